//! One source for what others read. The C functions in `src/` are written down a second time for C
//! and a third time for Python. The settings in `crates/options` are written for people and for
//! Python. None of that is done by hand.
//!
//! The tests fail where a written file is of another day than its source. With `UPDATE_INTERFACE=1`
//! they write it: `UPDATE_INTERFACE=1 cargo test -p memtrace --test interface`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use memtrace_devices::Toolkit;
use memtrace_format::key::{Memtrace, Row};
use memtrace_format::stacks::PYTHONS;
use memtrace_options::{
    ALL, Choice, DEVELOPMENT, LogLevel, Reader, Setting, Stacks, Value, remark,
};

/// Where the functions are, in the order of the header.
const SOURCES: [&str; 3] = ["src/api.rs", "src/allocator/hooks.rs", "src/allocator/ask.rs"];

/// Exported as well, for tests alone and for nobody's bindings.
const FOR_TESTS: &str = "src/debug.rs";

/// Where types are named that the functions use.
const TYPES: [&str; 2] = ["src/allocator/device.rs", "src/allocator/ask.rs"];

/// Columns of a line in the files that are written.
const WIDTH: usize = 100;

#[test]
fn the_header_and_the_python_package_have_the_functions_of_the_source() {
    let aliases = Aliases::read();
    let items: Vec<Item> = SOURCES.iter().flat_map(|file| items(&read(file))).collect();
    settle("include/memtrace.h", &header(&items, &aliases));
    settle("python/memtrace/_interface.py", &python(&items, &aliases));
}

#[test]
fn the_documentation_has_the_settings_of_the_table() {
    settle_table(DOCUMENTATION, TABLE_BEGINS, &settings());
    settle_versions(DOCUMENTATION);
}

#[test]
fn the_first_page_has_the_versions_that_are_known() {
    settle_versions("README.md");
}

#[test]
fn the_documentation_has_the_keys_of_a_snapshot() {
    settle_table(FILE_FORMAT, KEYS_BEGIN, &keys());
}

/// Settles what is in a file between two remarks.
fn settle_table(file: &str, begins: &str, table: &str) {
    let there = read(file);
    let (before, rest) = there.split_once(begins).expect("where the table begins");
    let (_, behind) = rest.split_once(TABLE_ENDS).expect("where the table ends");
    settle(file, &format!("{before}{begins}{table}{TABLE_ENDS}{behind}"));
}

/// Settles the line that says with which versions memtrace works.
fn settle_versions(file: &str) {
    const PLATFORM: &str = "\nLinux on x86-64";
    let there = read(file);
    let (before, rest) = there.split_once(PLATFORM).expect("the line of versions");
    let (line, behind) = rest.split_once('\n').expect("more behind it");
    let comma = &line[..1];
    let python = format!("CPython 3.{}–3.{}", PYTHONS.start(), PYTHONS.end());
    let (releases, cuda) = (releases(), Toolkit::ALL.map(|known| known.major().to_string()));
    let [oldest, .., newest] = &releases[..] else { panic!("several releases") };
    let torch = format!("PyTorch {oldest}–{newest} with CUDA {}", cuda.join(" or "));
    let line = format!("{comma} {python}{comma} {torch}.");
    settle(file, &format!("{before}{PLATFORM}{line}\n{behind}"));
}

/// The releases of PyTorch in whose libraries everything was found, the oldest first.
fn releases() -> Vec<String> {
    let source = read("src/pytorch/names.rs");
    let (_, list) = source.split_once("pub const RELEASES: ").expect("the list");
    let (list, _) =
        list.split_once(';').and_then(|(_, list)| list.split_once(';')).expect("its end");
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Names that tests get wrong on purpose.
const WRONG: [&str; 3] = ["MEMTRACE_STACK", "MEMTRACE_EVENT", "MEMTRACE_BANANA"];

/// The guard of the header against being read twice.
const NO_VARIABLE: &str = "MEMTRACE_H";

#[test]
fn every_variable_that_is_used_is_in_the_table() {
    for folder in
        ["src", "crates", "python", "include", "docs", "scripts", "bench", "tests", "examples"]
    {
        let is_meant = |path: &&PathBuf| !path.starts_with("crates/options") && is_source(path);
        for path in files(folder, "").iter().filter(is_meant) {
            let text = read(path.to_str().expect("a path of the repository"));
            for name in variables(&text).filter(|name| *name != NO_VARIABLE) {
                // A family is named by its beginning: MEMTRACE_TEST_…
                let is_known = DEVELOPMENT.contains(&name) || remark(name).is_none();
                let path = path.display();
                assert!(
                    is_known || WRONG.contains(&name),
                    "{path}: {name} is not in crates/options"
                );
            }
        }
    }
}

#[test]
fn every_row_of_the_table_is_read() {
    let code = [("src", "rs"), ("crates", "rs"), ("python/memtrace", "py")];
    let is_meant = |path: &PathBuf| {
        let is_of = |part: &str| path.components().any(|p| p.as_os_str() == part);
        !is_of("tests") && !is_of("options")
    };
    let paths = code.into_iter().flat_map(|(folder, ending)| files(folder, ending));
    let text: String = paths
        .filter(is_meant)
        .map(|path| read(path.to_str().expect("a path of the repository")))
        .collect();
    // Of those of the recorder a test in src/config.rs asks the reader itself.
    for setting in ALL.iter().filter(|setting| setting.reader != Reader::Recorder) {
        let name = setting.variable.trim_start_matches("MEMTRACE_");
        let read = [format!("{name}.variable"), format!("\"{}\"", setting.variable)];
        assert!(read.iter().any(|how| text.contains(how)), "nobody reads {}", setting.variable);
    }
}

#[test]
fn no_other_file_exports_a_function() {
    let below = ["crates/os/src", "crates/libraries/src", "crates/stack/src"];
    for path in
        files("src", "rs").into_iter().chain(below.into_iter().flat_map(|at| files(at, "rs")))
    {
        let file = path.to_str().expect("a path of the repository");
        let text = read(file);
        let found = items(&text).iter().filter(|i| matches!(i, Item::Function(_))).count();
        if !SOURCES.contains(&file) && file != FOR_TESTS {
            assert_eq!(found, 0, "{file} exports memtrace_… and is in no list of this test");
        } else {
            // What the parser below passes over would be missing everywhere.
            let written = text
                .lines()
                .filter(|l| l.starts_with("pub ") && l.contains(" fn memtrace_"))
                .count();
            assert_eq!(found, written, "{file}");
        }
    }
}

#[test]
fn the_python_package_calls_no_function_that_is_not_there() {
    let functions: Vec<String> = SOURCES
        .iter()
        .flat_map(|file| items(&read(file)))
        .filter_map(|i| if let Item::Function(f) = i { Some(f.name) } else { None })
        .collect();
    // The virtual GPU's own.
    let is_known = |name: &str| {
        name == "memtrace_virtual_stats" || functions.iter().any(|f| f.as_str() == name)
    };
    for path in files("python/memtrace", "py") {
        for name in names(&read(path.to_str().expect("a path of the repository"))) {
            assert!(is_known(&name), "{}: {name}", path.display());
        }
    }
}

#[test]
fn the_header_is_c_and_cpp() {
    for language in [["-xc", "-std=c99"], ["-xc++", "-std=c++11"]] {
        let output = Command::new("cc")
            .args(language)
            .args(["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
            .arg(root().join("include/memtrace.h"))
            .output()
            .expect("these tests need cc in PATH");
        let said = String::from_utf8_lossy(&output.stderr);
        // A compiler of C++ may not be there.
        assert!(output.status.success() || said.contains("cc1plus"), "{language:?}: {said}");
    }
}

// --- what is written -----------------------------------------------------------------------------

const BEFORE: &str = "\
/* memtrace: the C functions of libmemtrace.so.
 *
 * Written by tests/interface.rs from the source of the library. A program that is not linked to the
 * library looks them up when it runs, so that it also works untraced:
 *
 *     int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, \"memtrace_dump\");
 *     if (dump) dump(\"after_step_10.pickle\");
 */
#ifndef MEMTRACE_H
#define MEMTRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif
";

const BEHIND: &str = "
#ifdef __cplusplus
}
#endif
#endif
";

fn header(items: &[Item], aliases: &Aliases) -> String {
    let mut text = BEFORE.to_owned();
    for item in items {
        text.push('\n');
        match item {
            Item::Section(title, more) if more.is_empty() => {
                comment(&mut text, &format!("--- {title} ---"));
            }
            Item::Section(title, more) => {
                let _ = writeln!(text, "/* --- {title} ---");
                wrap(&mut text, &format!(" * {more}{FIRM}*/"), " * ");
            }
            Item::Function(function) => {
                comment(&mut text, &function.says());
                let arguments: Vec<String> =
                    function.arguments.iter().map(|(name, ty)| aliases.c(ty, name)).collect();
                let arguments =
                    if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
                let whole = format!("{}({arguments});", function.name);
                let whole = aliases.c(&function.result, &whole).replace(' ', FIRM);
                wrap(&mut text, &whole.replace(&format!(",{FIRM}"), ", "), "    ");
            }
        }
    }
    text + BEHIND
}

fn python(items: &[Item], aliases: &Aliases) -> String {
    let mut text = "\"\"\"The C functions of `libmemtrace.so`: result and arguments of each, as `ctypes` has them.\n\n\
        Written from the source of the library by `tests/interface.rs`; what each does is in `include/memtrace.h`.\n\"\"\"\n\n\
        from __future__ import annotations\n\n\
        import ctypes\n\
        from typing import Any\n\n\
        FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {\n"
        .to_owned();
    for item in items {
        let Item::Function(function) = item else { continue };
        let arguments: Vec<String> =
            function.arguments.iter().map(|(_, ty)| aliases.python(ty)).collect();
        let result = aliases.python(&function.result);
        let _ =
            writeln!(text, "    \"{}\": ({result}, [{}]),", function.name, arguments.join(", "));
    }
    text + "}\n\n# The words of settings.\n"
        + &tuple("STACKS", Stacks::CHOICES)
        + &tuple("LOG_LEVELS", LogLevel::CHOICES)
}

fn tuple(name: &str, words: &[Choice]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("\"{}\"", word.name)).collect();
    format!("{name} = ({})\n", words.join(", "))
}

const DOCUMENTATION: &str = "docs/running.md";
const TABLE_BEGINS: &str = "<!-- written from crates/options by tests/interface.rs -->\n";
const TABLE_ENDS: &str = "<!-- up to here -->\n";

const FILE_FORMAT: &str = "docs/file-format.md";
const KEYS_BEGIN: &str = "<!-- written from crates/format/src/key by tests/interface.rs -->\n";

/// Every key under `memtrace`. What a frame is has been said once for all of them.
fn keys() -> String {
    let mut text = "\n| key | type | meaning |\n|---|---|---|\n".to_owned();
    for Row { key, kind, meaning } in Memtrace::rows() {
        if !key.contains("frames[]") {
            let _ = writeln!(text, "| `{key}` | {kind} | {meaning} |");
        }
    }
    text.push('\n');
    text
}

/// The table of settings, for people.
fn settings() -> String {
    let mut text = "\n| option of `run` | variable | meaning |\n|---|---|---|\n".to_owned();
    for setting in ALL.iter().filter(|setting| setting.reader != Reader::Run) {
        let shape = setting.shape().replace('|', "\\|");
        let (option, variable) = match setting.option {
            Some(option) => (format!("`--{option} {shape}` "), format!("`{}`", setting.variable)),
            None => (String::new(), format!("`{}={shape}`", setting.variable)),
        };
        let _ = writeln!(text, "| {option}| {variable} | {} |", meaning(setting));
    }
    let ours: Vec<String> = ALL
        .iter()
        .filter(|setting| setting.reader == Reader::Run)
        .map(|setting| format!("`{}`", setting.variable))
        .collect();
    let _ = writeln!(
        text,
        "\nWhat the processes of a run hand down to each other is not to be set by hand: {}.\n",
        ours.join(", ")
    );
    text
}

fn meaning(setting: &Setting) -> String {
    let mut text = setting.help.to_owned();
    if let Value::Choices(words) = setting.value {
        let words: Vec<String> =
            words.iter().map(|word| format!("`{}` {}", word.name, word.help)).collect();
        let _ = write!(text, ": {}", words.join("; "));
    }
    if !setting.default.is_empty() {
        let _ = write!(text, " (default: {})", setting.default);
    }
    if !setting.more.is_empty() {
        let _ = write!(text, ". {}", setting.more);
    }
    text
}

/// A comment of C's.
fn comment(text: &mut String, says: &str) {
    wrap(text, &format!("/* {says}{FIRM}*/"), " * ");
}

/// A blank where no line ends.
const FIRM: &str = "\u{a0}";

/// Words in lines, which begin with `others` from the second on.
fn wrap(text: &mut String, words: &str, others: &str) {
    let mut words = words.split(' ');
    let mut line = words.next().unwrap_or_default().to_owned();
    for word in words {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(text, "{}", line.replace(FIRM, " "));
            line = format!("{others}{word}");
        } else {
            line.push(' ');
            line.push_str(word);
        }
    }
    let _ = writeln!(text, "{}", line.replace(FIRM, " "));
}

// --- what is read --------------------------------------------------------------------------------

/// A line between `---`, with the comment under it, or a function.
enum Item {
    Section(String, String),
    Function(Function),
}

/// A function that is exported under its name.
struct Function {
    docs: Vec<String>,
    name: String,
    arguments: Vec<(String, String)>,
    /// `()` for nothing.
    result: String,
}

impl Function {
    /// What is above it, in C's words.
    fn says(&self) -> String {
        let docs = self.docs.iter().take_while(|line| *line != "# Safety");
        let text = docs.map(String::as_str).collect::<Vec<_>>().join(" ");
        let text = text.replace("[`", "").replace("`]", "").replace('`', "").replace('−', "-");
        let null = |word: &str| {
            if word.trim_end_matches([',', '.', ';', ':']) == "null" {
                word.replace("null", "NULL")
            } else {
                word.to_owned()
            }
        };
        text.split_whitespace().map(null).collect::<Vec<_>>().join(" ")
    }
}

/// The sections and functions of a file. It is formatted, so a function begins with
/// `#[unsafe(no_mangle)]` at the beginning of a line.
fn items(source: &str) -> Vec<Item> {
    let (mut items, mut docs, mut is_exported) = (Vec::new(), Vec::new(), false);
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("// --- ") {
            let title = title.trim_end_matches(['-', ' ']);
            let more = lines.by_ref().map_while(|l| l.strip_prefix("// ")).collect::<Vec<_>>();
            items.push(Item::Section(title.to_owned(), more.join(" ")));
        } else if let Some(says) = line.strip_prefix("///") {
            docs.push(says.trim().to_owned());
        } else if line == "#[unsafe(no_mangle)]" {
            is_exported = true;
        } else if is_exported && line.contains(" fn memtrace_") {
            let mut whole = line.to_owned();
            while !whole.ends_with('{') {
                whole.push(' ');
                whole.push_str(lines.next().expect("a body").trim());
            }
            items.push(Item::Function(function(&whole, std::mem::take(&mut docs))));
            is_exported = false;
        } else {
            docs.clear();
            is_exported = false;
        }
    }
    items
}

fn function(whole: &str, docs: Vec<String>) -> Function {
    let (_, whole) = whole.split_once(" fn ").expect("a function");
    let (name, rest) = whole.split_once('(').expect("arguments");
    let (arguments, result) = rest.rsplit_once(')').expect("arguments");
    let result = result.trim_end_matches('{').trim();
    let argument = |text: String| {
        let (name, ty) = text.split_once(": ").expect("a name and a type");
        (name.trim_start_matches('_').to_owned(), ty.to_owned())
    };
    Function {
        docs,
        name: name.to_owned(),
        arguments: parts(arguments).into_iter().map(argument).collect(),
        result: result.strip_prefix("-> ").unwrap_or("()").to_owned(),
    }
}

/// What commas part, outside parentheses.
fn parts(text: &str) -> Vec<String> {
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in text.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        match c {
            ',' if depth == 0 => parts.push(String::new()),
            c => parts.last_mut().expect("one").push(c),
        }
    }
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// Names that the source gives to types of functions.
struct Aliases(Vec<(String, String)>);

impl Aliases {
    fn read() -> Aliases {
        let one = |line: &str| {
            let line = line.trim_start_matches("pub ").strip_prefix("type ")?;
            let (name, ty) = line.strip_suffix(';')?.split_once(" = ")?;
            ty.contains(" fn(").then(|| (name.to_owned(), ty.to_owned()))
        };
        let text: String = TYPES.iter().map(|file| read(file)).collect();
        Aliases(text.lines().filter_map(one).collect())
    }

    /// The type that a name stands for. A pointer of C's may be null anyway.
    fn meant<'a>(&'a self, ty: &'a str) -> &'a str {
        let ty = ty.strip_prefix("Option<").and_then(|t| t.strip_suffix('>')).unwrap_or(ty);
        self.0.iter().find(|(name, _)| name == ty).map_or(ty, |(_, meant)| meant)
    }

    /// The declaration of `what` with this type, in C.
    fn c(&self, ty: &str, what: &str) -> String {
        let ty = self.meant(ty);
        if let Some(target) = ty.strip_prefix("*mut ") {
            return self.c(target, &format!("*{what}"));
        }
        if let Some(target) = ty.strip_prefix("*const ") {
            return if target.starts_with('*') {
                self.c(target, &format!("const *{what}"))
            } else {
                format!("const {}", self.c(target, &format!("*{what}")))
            };
        }
        if let Some((_, rest)) = ty.split_once(" fn(") {
            let (arguments, result) = rest.rsplit_once(')').expect("arguments");
            let arguments: Vec<String> = parts(arguments).iter().map(|ty| self.c(ty, "")).collect();
            let result = result.strip_prefix(" -> ").unwrap_or("()");
            return self.c(result, &format!("(*{what})({})", arguments.join(", ")));
        }
        format!("{} {what}", Self::plain(ty)[0]).trim_end().to_owned()
    }

    /// The type in `ctypes`. Text that is written into memory of the caller's, and
    /// text to be given back, is a pointer.
    fn python(&self, ty: &str) -> String {
        let ty = self.meant(ty);
        match ty {
            "*const c_char" => "ctypes.c_char_p".to_owned(),
            "()" => "None".to_owned(),
            _ if ty.starts_with('*') || ty.contains(" fn(") => "ctypes.c_void_p".to_owned(),
            _ => format!("ctypes.{}", Self::plain(ty)[1]),
        }
    }

    /// A type that is no pointer, in C and in `ctypes`.
    fn plain(ty: &str) -> [&'static str; 2] {
        match ty {
            "()" | "c_void" => ["void", ""],
            "c_char" => ["char", "c_char"],
            "c_int" => ["int", "c_int"],
            "u32" => ["uint32_t", "c_uint32"],
            "u64" => ["uint64_t", "c_uint64"],
            "i64" => ["int64_t", "c_int64"],
            "usize" => ["size_t", "c_size_t"],
            "f64" => ["double", "c_double"],
            other => panic!("{other} has no type of C's in tests/interface.rs"),
        }
    }
}

/// What a Python file calls of ours: `.memtrace_…` and names in quotes.
fn names(text: &str) -> Vec<String> {
    let starts = text.match_indices("memtrace_").map(|(at, _)| at);
    let called = starts.filter(|at| text[..*at].ends_with(['.', '"']));
    let is_of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    called
        .map(|at| text[at..].chars().take_while(|c| is_of_a_name(*c)).collect::<String>())
        .collect()
}

/// Variables that a text names.
fn variables(text: &str) -> impl Iterator<Item = &str> {
    const PREFIX: &str = "MEMTRACE_";
    text.match_indices(PREFIX).filter_map(|(at, _)| {
        let is_of_a_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        let rest = &text[at + PREFIX.len()..];
        let length = rest.find(|c| !is_of_a_name(c)).unwrap_or(rest.len());
        let begins = !text[..at].ends_with(is_of_a_name);
        (begins && length > 0).then(|| &text[at..at + PREFIX.len() + length])
    })
}

// --- files ---------------------------------------------------------------------------------------

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// All files of a folder with this ending, or with any if it is empty, by paths from the root.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join(folder)).expect("a folder").map(|e| e.expect("an entry"))
    {
        let path = Path::new(folder).join(entry.file_name());
        if entry.path().is_dir() {
            found.extend(files(path.to_str().expect("a path of the repository"), ending));
        } else if ending.is_empty() || path.extension().is_some_and(|e| e == ending) {
            found.push(path);
        }
    }
    found
}

/// Is it a text that people write?
fn is_source(path: &Path) -> bool {
    let endings = ["rs", "py", "md", "c", "h", "cc", "cpp", "sh", "toml", "ipynb", "snap"];
    let is_script = path.extension().is_none() && path.starts_with("scripts");
    is_script || path.extension().is_some_and(|e| endings.iter().any(|ending| e == *ending))
}

/// Is the file what it should be? If that is asked for, it is made so.
fn settle(file: &str, wanted: &str) {
    if env::var_os("UPDATE_INTERFACE").is_some() {
        fs::write(root().join(file), wanted).unwrap_or_else(|e| panic!("{file}: {e}"));
    }
    let there = fs::read_to_string(root().join(file)).unwrap_or_default();
    let differs = there.lines().zip(wanted.lines()).position(|(a, b)| a != b);
    let at = differs.unwrap_or_else(|| there.lines().count().min(wanted.lines().count()));
    let line = |text: &str| text.lines().nth(at).unwrap_or("(its end)").to_owned();
    assert!(
        there == wanted,
        "{file} is not what its source says, from line {}:\n  there  {}\n  source {}\n\
         UPDATE_INTERFACE=1 cargo test -p memtrace --test interface writes it",
        at + 1,
        line(&there),
        line(wanted)
    );
}
