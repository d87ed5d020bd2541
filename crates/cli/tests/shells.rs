//! Completions and the manual, by the programs that read them.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{memtrace, ok, refused};
use tempfile::TempDir;

fn prints(args: &[&str]) -> String {
    ok(&memtrace().args(args).output().expect("started"))
}

/// Is there such a program? If not, what needs it is passed over.
fn is_there(program: &str) -> bool {
    let mut asks = Command::new(program);
    let found = asks.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        eprintln!("{program} is not installed: passed over");
    }
    found
}

/// Every command with its options, but for what is hidden.
fn verbs() -> Vec<(String, Vec<String>)> {
    let whole = memtrace_cli::command();
    let shown = whole.get_subcommands().filter(|verb| !verb.is_hide_set());
    let one = |verb: &clap::Command| {
        let options = verb.get_opts().filter(|option| !option.is_hide_set());
        let options = options.filter_map(|option| option.get_long().map(str::to_owned));
        (verb.get_name().to_owned(), options.collect())
    };
    let verbs: Vec<(String, Vec<String>)> = shown.map(one).collect();
    assert!(verbs.len() > 10 && verbs.iter().any(|(_, options)| options.len() > 4));
    verbs
}

#[test]
fn each_script_knows_every_command_and_option() {
    for shell in ["bash", "zsh", "fish"] {
        let script = prints(&["completions", shell]);
        for (verb, options) in verbs() {
            assert!(script.contains(&verb), "{shell}: {verb}");
            for option in options {
                // fish writes options without dashes.
                let written =
                    if shell == "fish" { format!("-l {option}") } else { format!("--{option}") };
                assert!(script.contains(&written), "{shell}: {verb} --{option}");
            }
        }
    }
    let other = memtrace().args(["completions", "tcsh"]).output().expect("started");
    assert_eq!(other.status.code(), Some(2));
}

#[test]
fn each_shell_can_read_its_script() {
    let folder = TempDir::new().expect("a folder");
    for (shell, reads) in [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")] {
        if is_there(shell) {
            let file = folder.path().join(shell);
            fs::write(&file, prints(&["completions", shell])).expect("written");
            let output = Command::new(shell).arg(reads).arg(&file).output().expect("started");
            assert_eq!(ok(&output), "", "{shell}");
        }
    }
}

/// What bash offers for the last of these words. `before` is run in the shell first.
fn bash(before: &str, words: &[&str]) -> Vec<String> {
    const ASKS: &str = r#"
        eval "$1"; source "$2"; shift 2
        function=$(complete -p memtrace); function=${function#*-F }; function=${function%% *}
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        "$function" memtrace "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let folder = TempDir::new().expect("a folder");
    let script = folder.path().join("script");
    fs::write(&script, prints(&["completions", "bash"])).expect("written");
    let output = Command::new("bash")
        .args(["--noprofile", "--norc", "-c", ASKS, "bash", before])
        .arg(&script)
        .args(words)
        .output()
        .expect("these tests need bash");
    ok(&output).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_options_and_words() {
    assert_eq!(bash("", &["memtrace", "re"]), ["report", "recover", "replay"]);
    assert_eq!(bash("", &["memtrace", "run", "--st"]), ["--stacks"]);
    assert_eq!(bash("", &["memtrace", "run", "--stacks", ""]), ["none", "python", "all"]);
    assert_eq!(bash("", &["memtrace", "recover", "--permissions", "u"]), ["umask"]);
    assert_eq!(bash("", &["memtrace", "completions", "b"]), ["bash"]);
    // What is for other programs' eyes is not offered, and neither is what is no word.
    let all = bash("", &["memtrace", "run", ""]);
    assert!(all.iter().all(|word| word.starts_with('-') && word != "--list"), "{all:?}");
}

#[test]
fn bash_leaves_what_is_behind_the_dashes_to_the_program() {
    let none: [&str; 0] = [];
    assert_eq!(bash("", &["memtrace", "run", "--", "python", "--st"]), none);
    assert!(bash("", &["memtrace", "run", "--", "bas"]).contains(&"bash".to_owned()));
    let theirs = "_comp_command_offset() { COMPREPLY=(\"from ${COMP_WORDS[$1]}\"); }";
    for words in [
        &["memtrace", "run", "--", "python", "-"][..],
        &["memtrace", "doctor", "--", "python", "x"],
    ] {
        assert_eq!(bash(theirs, words), ["from python"]);
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let whole = prints(&["man"]);
    for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SUBCOMMANDS", "ENVIRONMENT"] {
        assert!(whole.contains(&format!(".SH {heading}\n")), "{heading}: {whole}");
    }
    for (verb, options) in verbs() {
        let page = prints(&["man", &verb]);
        assert!(whole.contains(&format!("memtrace\\-{verb}(1)")), "{verb}: {whole}");
        for option in options {
            let option = format!("\\-\\-{}", option.replace('-', "\\-"));
            assert!(page.contains(&option), "{verb} {option}: {page}");
        }
    }
    let line = refused(&memtrace().args(["man", "none"]).output().expect("started"));
    assert!(line.contains("there is no command 'none'"), "{line}");
}

#[test]
fn the_manual_can_be_read() {
    let folder = TempDir::new().expect("a folder");
    let at = folder.path().join("share/man/man1");
    let out = at.to_str().expect("a path");
    for _ in 0..2 {
        let written = prints(&["man", "--out", out]);
        assert_eq!(written.lines().count(), verbs().len() + 1, "{written}");
        assert!(written.lines().all(|path| Path::new(path).is_file()), "{written}");
    }
    let pages = [at.join("memtrace.1"), at.join("memtrace-run.1")];
    let texts = |reader: &[&str]| {
        pages.each_ref().map(|page| {
            let mut command = Command::new(reader[0]);
            let output = command.args(&reader[1..]).arg(page).env("MANWIDTH", "100").output();
            ok(&output.expect("started"))
        })
    };
    let mut readers = vec![];
    if is_there("man") {
        readers.push(texts(&["man", "--warnings", "-P", "cat", "-l"]));
    }
    if is_there("groff") {
        readers.push(texts(&["groff", "-ww", "-man", "-Tutf8", "-P-c"]));
    }
    for [whole, run] in readers {
        // Without what makes letters bold: a letter, a step back, the letter.
        let plain = |text: &str| {
            let mut plain = String::new();
            text.chars().for_each(|c| if c == '\u{8}' { _ = plain.pop() } else { plain.push(c) });
            plain
        };
        let (whole, run) = (plain(&whole), plain(&run));
        assert!(whole.contains("memtrace-run(1)") && whole.contains("MEMTRACE_STACKS="), "{whole}");
        // Examples keep their lines.
        assert!(run.lines().any(|line| line.trim() == "memtrace run -- python train.py"), "{run}");
        assert!(run.contains("--stacks"), "{run}");
    }
}
