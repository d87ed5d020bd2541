//! Settings with a fixed set of choices, each as a type: a reader can't
//! forget a choice or take it for another setting's.

use crate::{CONTEXT, FORMAT, LOG_LEVEL, PERMISSIONS, QUIET, STACKS, Setting, VIRTUAL_LOG};

/// One of the texts that a setting can be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// As it is typed.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
}

/// The type of a setting with a fixed set of choices. Its default is that of the setting.
pub trait Choices: Copy + Default + Send + Sync + 'static {
    /// The setting.
    const SETTING: &'static Setting;
    /// All, with their texts, in the order of the documentation.
    const ALL: &'static [(Self, Choice)];

    /// The one with this name.
    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, choice)| choice.name == name).map(|(this, _)| *this)
    }
}

macro_rules! choices {
    ($(#[$about:meta])* $name:ident: $setting:ident {
        $($(#[$mark:meta])* $variant:ident = $choice:literal: $help:literal,)+
    }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name {
            $(#[doc = concat!("`", $choice, "`: ", $help)] $(#[$mark])* $variant,)+
        }

        impl $name {
            /// The choices, in the order of the documentation.
            pub const CHOICES: &'static [Choice] = &[$(Choice { name: $choice, help: $help }),+];

            /// The text for it.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $choice),+ }
            }
        }

        impl Choices for $name {
            const SETTING: &'static Setting = &$setting;
            const ALL: &'static [($name, Choice)] =
                &[$(($name::$variant, Choice { name: $choice, help: $help })),+];
        }
    };
}

choices! {
    /// Which frames a stack has.
    Stacks: STACKS {
        None = "none": "no stacks",
        Python = "python": "Python frames",
        #[default]
        All = "all": "Python and native frames",
    }
}

choices! {
    /// Which events have a stack.
    Context: CONTEXT {
        Alloc = "alloc": "allocations alone",
        #[default]
        All = "all": "frees, too",
    }
}

choices! {
    /// How a snapshot is written.
    Format: FORMAT {
        #[default]
        Pickle = "pickle": "what PyTorch's viewers read",
        Json = "json": "the same, as JSON with each stack once",
        JsonExpanded = "json-expanded": "the same, with every stack spelled out",
    }
}

impl Format {
    /// The file name's extension.
    pub const fn extension(self) -> &'static str {
        match self {
            Format::Pickle => "pickle",
            Format::Json | Format::JsonExpanded => "json",
        }
    }

    /// With every stack spelled out, if that is asked for.
    #[must_use]
    pub fn expanded(self, expand: bool) -> Format {
        if expand && self == Format::Json { Format::JsonExpanded } else { self }
    }
}

choices! {
    /// Who may read a snapshot.
    Permissions: PERMISSIONS {
        #[default]
        Private = "private": "you alone (mode 0600)",
        Umask = "umask": "whoever your umask lets",
    }
}

choices! {
    /// Is anything said but errors?
    Quiet: QUIET {
        #[default]
        No = "0": "what was written, and what is missing in it",
        Yes = "1": "errors alone",
    }
}

choices! {
    /// What the virtual GPU says.
    VirtualLog: VIRTUAL_LOG {
        #[default]
        Nothing = "0": "what is missing in an estimate",
        Errors = "1": "errors that it answers and workspaces, too",
        Calls = "2": "every allocation and copy, too",
    }
}

choices! {
    /// What the Python package logs.
    LogLevel: LOG_LEVEL {
        Debug = "debug": "everything",
        Info = "info": "what it does",
        #[default]
        Warning = "warning": "what goes wrong",
        Error = "error": "errors alone",
        Off = "off": "nothing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Value;

    fn agrees<T: Choices + PartialEq + std::fmt::Debug>() {
        let Value::Choices(choices) = T::SETTING.value else { panic!("{}", T::SETTING.variable) };
        assert!(
            choices.iter().eq(T::ALL.iter().map(|(_, choice)| choice)),
            "{}",
            T::SETTING.variable
        );
        assert_eq!(T::named(T::SETTING.default), Some(T::default()));
        assert_eq!(T::named("nonsense"), None);
    }

    #[test]
    fn a_type_and_its_setting_have_the_same_words_and_default() {
        agrees::<Stacks>();
        agrees::<Context>();
        agrees::<Format>();
        agrees::<Permissions>();
        agrees::<Quiet>();
        agrees::<VirtualLog>();
        agrees::<LogLevel>();
    }

    #[test]
    fn formats() {
        assert_eq!(Format::Json.expanded(true).extension(), "json");
        assert_eq!(Format::Json.expanded(true), Format::JsonExpanded);
        assert_eq!(Format::Pickle.expanded(true), Format::Pickle);
    }
}
