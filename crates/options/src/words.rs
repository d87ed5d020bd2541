//! Settings that are one of some words, each as a type: whoever reads one can't
//! forget a word or take it for another's.

use crate::{CONTEXT, FORMAT, LOG_LEVEL, PERMISSIONS, QUIET, STACKS, Setting, VIRTUAL_LOG};

/// A word that a setting can be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// As it is typed.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
}

/// The type of a setting that is one of some words; its default is that of the setting.
pub trait Words: Copy + Default + Send + Sync + 'static {
    /// The setting.
    const SETTING: &'static Setting;
    /// All, with their words, in the order of the documentation.
    const ALL: &'static [(Self, Word)];

    /// The one with this name.
    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, word)| word.name == name).map(|(this, _)| *this)
    }
}

macro_rules! words {
    ($(#[$about:meta])* $name:ident: $setting:ident {
        $($(#[$mark:meta])* $variant:ident = $word:literal: $help:literal,)+
    }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name {
            $(#[doc = concat!("`", $word, "`: ", $help)] $(#[$mark])* $variant,)+
        }

        impl $name {
            /// The words, in the order of the documentation.
            pub const WORDS: &'static [Word] = &[$(Word { name: $word, help: $help }),+];

            /// The word for it.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }

        impl Words for $name {
            const SETTING: &'static Setting = &$setting;
            const ALL: &'static [($name, Word)] =
                &[$(($name::$variant, Word { name: $word, help: $help })),+];
        }
    };
}

words! {
    /// Which frames a stack has.
    Stacks: STACKS {
        None = "none": "no stacks",
        Python = "python": "Python frames",
        #[default]
        All = "all": "Python and native frames",
    }
}

words! {
    /// Which events have a stack.
    Context: CONTEXT {
        Alloc = "alloc": "allocations alone",
        #[default]
        All = "all": "frees, too",
    }
}

words! {
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

words! {
    /// Who may read a snapshot.
    Permissions: PERMISSIONS {
        #[default]
        Private = "private": "you alone (mode 0600)",
        Umask = "umask": "whoever your umask lets",
    }
}

words! {
    /// Is anything said but errors?
    Quiet: QUIET {
        #[default]
        No = "0": "what was written, and what is missing in it",
        Yes = "1": "errors alone",
    }
}

words! {
    /// What the virtual GPU says.
    VirtualLog: VIRTUAL_LOG {
        #[default]
        Nothing = "0": "what is missing in an estimate",
        Errors = "1": "errors that it answers and workspaces, too",
        Calls = "2": "every allocation and copy, too",
    }
}

words! {
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

    fn agrees<T: Words + PartialEq + std::fmt::Debug>() {
        let Value::Words(words) = T::SETTING.value else { panic!("{}", T::SETTING.variable) };
        assert!(words.iter().eq(T::ALL.iter().map(|(_, word)| word)), "{}", T::SETTING.variable);
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
