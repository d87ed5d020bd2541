//! `memtrace man`: the manual, a page for the command and one for each of its verbs.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Command;
use clap_mangen::Man as Writer;
use clap_mangen::roff::{Roff, bold, italic, roman};
use memtrace_files::{NewFile, Readers};
use memtrace_options::{ALL, Reader, Setting, Value};
use memtrace_terminal::Page;

use crate::args::Man;
use crate::command;
use crate::failure::Failure;
use crate::say::Answer;

pub(crate) fn man(args: &Man) -> Result<Answer, Failure> {
    let mut whole = command().disable_help_subcommand(true);
    whole.build();
    let verbs = || whole.get_subcommands().filter(|verb| !verb.is_hide_set());
    let page = |about: &Command| {
        page(about).map_err(|e| Failure::new(format!("cannot write the manual: {e}")))
    };
    if let Some(folder) = &args.out {
        let mut written = Page::default();
        for about in std::iter::once(&whole).chain(verbs()) {
            let path = place(folder, name(about), &page(about)?).map_err(|e| {
                Failure::new(format!("cannot write the manual into {}: {e}", folder.display()))
            })?;
            let _ = writeln!(written, "{}", path.display());
        }
        return Ok(Answer::page(written, true));
    }
    let about = match &args.command {
        None => &whole,
        Some(verb) => verbs().find(|about| about.get_name() == verb).ok_or_else(|| {
            Failure::new(format!("there is no command '{verb}'; memtrace --help lists them"))
        })?,
    };
    Ok(Answer::written(page(about)?))
}

/// The name of a page: `memtrace` or `memtrace-run`.
fn name(about: &Command) -> &str {
    about.get_display_name().unwrap_or_else(|| about.get_name())
}

fn place(folder: &Path, name: &str, page: &str) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("{name}.1"));
    let new = NewFile::within(folder, Readers::Umask)?;
    new.file().write_all(page.as_bytes())?;
    new.replace(&path)?;
    Ok(path)
}

fn page(about: &Command) -> io::Result<String> {
    let is_whole = about.has_subcommands();
    let version = format!("memtrace {}", env!("CARGO_PKG_VERSION"));
    let writer = Writer::new(about.clone()).title(name(about)).source(version).manual("memtrace");
    let mut text = Vec::new();
    writer.render_title(&mut text)?;
    writer.render_name_section(&mut text)?;
    writer.render_synopsis_section(&mut text)?;
    writer.render_description_section(&mut text)?;
    writer.render_options_section(&mut text)?;
    if is_whole {
        writer.render_subcommands_section(&mut text)?;
    }
    let mut rest = Roff::new();
    if is_whole || about.get_name() == "run" {
        environment(&mut rest);
    }
    if let Some(examples) = about.get_after_help() {
        examples_and_notes(&mut rest, &examples.to_string());
    }
    rest.to_writer(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn environment(page: &mut Roff) {
    page.control("SH", ["ENVIRONMENT"]);
    for setting in ALL.iter().filter(|setting| setting.reader != Reader::Run) {
        page.control("TP", []);
        page.text([bold(setting.variable), roman("="), italic(setting.shape())]);
        page.text([roman(sentences(setting))]);
    }
}

fn sentences(setting: &Setting) -> String {
    let mut parts = vec![format!("{}.", setting.help)];
    if let Value::Choices(words) = setting.value {
        let words = words.iter().map(|word| format!("{}: {}", word.name, word.help));
        parts.push(format!("{}.", words.collect::<Vec<_>>().join("; ")));
    }
    if !setting.default.is_empty() {
        parts.push(format!("Default: {}.", setting.default));
    }
    if !setting.more.is_empty() {
        parts.push(setting.more.to_owned());
    }
    let set_by = |option| format!("The option --{option} of memtrace run sets it.");
    parts.extend(setting.option.map(set_by));
    parts.join(" ")
}

/// What is under the options in help: examples, as they are typed, and sentences.
fn examples_and_notes(page: &mut Roff, text: &str) {
    let mut is_typed = false;
    let is_example = |line: &str| line.starts_with("  ");
    page.control("SH", [if text.starts_with("Examples") { "EXAMPLES" } else { "NOTES" }]);
    for line in text.lines().filter(|line| *line != "Examples:") {
        if is_example(line) != is_typed {
            is_typed = !is_typed;
            page.control(if is_typed { "nf" } else { "fi" }, []);
        }
        match line.trim() {
            "" => page.control("PP", []),
            line if is_typed => page.text([roman(line)]),
            line => page.text([roman(line)]).control("br", []),
        };
    }
    if is_typed {
        page.control("fi", []);
    }
}
