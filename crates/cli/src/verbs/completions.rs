//! `memtrace completions`: the script by which a shell completes this command.

use clap_complete::{Generator, aot, generate};

use crate::args::{Completions, Shell};
use crate::command;
use crate::say::Answer;

/// Behind `--` it is the program's turn, and its own completion knows what comes there. Scripts for
/// other shells learn it from the hint at the argument. The one for bash has no words for it.
const BASH: &str = r#"
_memtrace_or_program() {
    local i
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ "${COMP_WORDS[i]}" == -- ]]; then
            if declare -F _comp_command_offset >/dev/null; then
                _comp_command_offset $((i + 1))
            elif declare -F _command_offset >/dev/null; then
                _command_offset $((i + 1))
            elif ((COMP_CWORD == i + 1)); then
                mapfile -t COMPREPLY < <(compgen -c -- "$2")
            fi
            return
        fi
    done
    _memtrace "$@"
}

complete -F _memtrace_or_program -o bashdefault -o default memtrace
"#;

pub(crate) fn completions(args: &Completions) -> Answer {
    Answer::written(match args.shell {
        Shell::Bash => without_hidden(&script(aot::Bash)) + BASH,
        Shell::Zsh => script(aot::Zsh),
        Shell::Fish => script(aot::Fish),
    })
}

/// The script for bash offers every option, also those that help doesn't show.
fn without_hidden(script: &str) -> String {
    let command = command();
    let options = command.get_subcommands().flat_map(clap::Command::get_opts);
    let hidden = options.filter(|option| option.is_hide_set());
    let hidden: Vec<String> =
        hidden.filter_map(|option| Some(format!(" --{} ", option.get_long()?))).collect();
    let one = |line: &str| {
        let is_offer = line.trim_start().starts_with("opts=\"");
        let hidden = hidden.iter().filter(|_| is_offer);
        hidden.fold(line.to_owned(), |line, option| line.replace(option, " "))
    };
    script.split_inclusive('\n').map(one).collect()
}

fn script(shell: impl Generator) -> String {
    let mut script = Vec::new();
    generate(shell, &mut command(), "memtrace", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
