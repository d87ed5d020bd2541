//! Options that are settings: their names, words and help are those of the
//! table in `memtrace-options`.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser, ValueParser};
use clap::error::Error;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, ValueHint};
use memtrace_options::{ALL, Choice, Choices, Reader, Setting, Value};

/// What `memtrace run` was asked to set for the recorder, by variable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings(Vec<(&'static Setting, OsString)>);

impl Settings {
    /// What was set, each once.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static Setting, &OsStr)> {
        self.0.iter().map(|(setting, value)| (*setting, value.as_os_str()))
    }

    /// The value of one.
    pub(crate) fn of(&self, setting: &Setting) -> Option<&OsStr> {
        self.given().find(|(this, _)| *this == setting).map(|(_, value)| value)
    }
}

/// Settings of the recorder that have an option.
fn offered() -> impl Iterator<Item = (&'static Setting, &'static str)> {
    let of_the_recorder = ALL.iter().filter(|setting| setting.reader == Reader::Recorder);
    of_the_recorder.filter_map(|setting| Some((*setting, setting.option?)))
}

/// Where help shows the option: what isn't in the table has room between two.
const fn place(i: usize) -> usize {
    10 * (i + 1)
}

/// Behind the option of a setting.
pub(crate) fn behind(setting: &Setting) -> usize {
    offered().position(|(this, _)| this == setting).map_or(0, place) + 1
}

/// Behind the options of all settings.
pub(crate) fn behind_all() -> usize {
    place(offered().count())
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = |(setting, option)| Some((setting, matches.get_one(option).cloned()?));
        Ok(Settings(offered().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Settings::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        command.args(offered().enumerate().map(|(i, (setting, option))| {
            let (values, hint) = match setting.value {
                Value::Choices(words) => {
                    (one_of(words).map(OsString::from).into(), ValueHint::Unknown)
                }
                Value::Folder => (ValueParser::os_string(), ValueHint::DirPath),
                Value::File => (ValueParser::os_string(), ValueHint::FilePath),
                _ => (ValueParser::os_string(), ValueHint::Unknown),
            };
            let arg = Arg::new(option).long(option).value_name(setting.placeholder);
            arg.help(help(setting)).value_parser(values).value_hint(hint).display_order(place(i))
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn one_of(words: &[Choice]) -> PossibleValuesParser {
    PossibleValuesParser::new(words.iter().map(|w| PossibleValue::new(w.name).help(w.help)))
}

/// Reads the words of a setting.
pub(crate) fn choices<T: Choices>() -> impl TypedValueParser<Value = T> {
    let words: Vec<Choice> = T::ALL.iter().map(|(_, word)| *word).collect();
    one_of(&words).try_map(|name| T::named(&name).ok_or("it is in no table"))
}

/// What the help of an option says.
pub(crate) fn help(setting: &Setting) -> String {
    match setting.default {
        "" => setting.help.to_owned(),
        default => format!("{} [default: ${}, or {default}]", setting.help, setting.variable),
    }
}

/// The same, where there is room.
pub(crate) fn long_help(setting: &Setting) -> String {
    format!("{}. {}", help(setting), setting.more)
}

/// Behind examples: the variables that have no option.
pub(crate) fn and_variables(examples: &str) -> String {
    let mut text = format!("{examples}\n\nVariables without an option:");
    for setting in ALL.iter().filter(|s| s.option.is_none() && s.reader != Reader::Run) {
        let default = match setting.default {
            "" => String::new(),
            default => format!(" [default: {default}]"),
        };
        let (variable, shape, help) = (setting.variable, setting.shape(), setting.help);
        let _ = write!(text, "\n  {variable}={shape}\n      {help}{default}");
    }
    text
}
