//! Turns the tables in `api/` into the parts of the library that nobody should write by hand.
//!
//! The public APIs have some 2,000 functions; a few hundred of them matter to memory and are
//! written in `src/`. This script finds out which those are (it looks for `fn NAME` with the name
//! of an API function) and makes the rest:
//!
//! * `stubs.rs`: every other function. Those that `api/behaviour.tsv` names do what that table
//!   says. All others report once that they are not supported, and return their API's own code for
//!   it. The variants for per-thread default streams, and older names with the same binary
//!   interface, jump to the function written by hand.
//! * `twins.rs`: the runtime functions that do what a driver function does (see `src/entries.rs`).
//! * `entry.rs`: the driver's functions by name and CUDA version, for `cuGetProcAddress`.
//! * `layout.rs`: sizes and field offsets of the records that callers
//!   pass, for each major version of CUDA.
//! * `constants.rs`: enumerators by name.
//!
//! A row of `behaviour.tsv` stops the build if it names an unknown function or parameter, or a
//! function that is also written by hand. A slip must not become a stub.
//!
//! `behaviour.tsv`: symbol (braces expand: `cublas{S,D}axpy_v2`), class, details; `#` begins
//! a comment. A twin's parameters must be those of the driver's function in every toolkit
//! that declares them, or the build stops.
//!
//! | class | does | details |
//! |---|---|---|
//! | `open`, `close` | a session of the library, with a stream; the first parameter | |
//! | `stream`, `get-stream` | sets or reads its stream, the second parameter | |
//! | `create`, `destroy` | an opaque object, the first parameter | |
//! | `compute` | a launch on the session's stream | `result=PARAM:BYTES`: in device or host memory |
//! | `launch` | the same, and writes numbers | as `out` |
//! | `out` | writes numbers | `PARAM=EXPRESSION` of integer parameters and `libs::model`, one a column |
//! | `twin` | what the driver function in the third column does; braces expand side by side | `first=N`: only N parameters count, the others differ |
//! | `set` | succeeds: what it sets is never read, what it checks is always so | |

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// `writeln!` to a string, which can't fail.
macro_rules! line {
    ($out:expr, $($format:tt)*) => { writeln!($out, $($format)*).expect("a string") };
}

/// What the build script knows of one parameter.
struct Param {
    name: String,
    abi: String,
}

/// One prototype of a function; a name may have two, one per toolkit.
struct Prototype {
    returns: String,
    params: Vec<Param>,
}

impl Prototype {
    fn abi(&self) -> Vec<&str> {
        self.params.iter().map(|p| p.abi.as_str()).collect()
    }
}

struct Api {
    prototypes: BTreeMap<String, Vec<Prototype>>,
    constants: BTreeMap<String, i64>,
    /// Every function to be exported, with its library.
    symbols: BTreeMap<String, String>,
}

/// Return type, and the enumerator that means "not supported" in that API. 0 is for functions
/// whose result is not a status: a null pointer, an empty size.
const UNSUPPORTED: [(&str, &str); 15] = [
    ("cudaError_t", "cudaErrorNotSupported"),
    ("CUresult", "CUDA_ERROR_NOT_SUPPORTED"),
    ("cublasStatus_t", "CUBLAS_STATUS_NOT_SUPPORTED"),
    ("cudnnStatus_t", "CUDNN_STATUS_NOT_SUPPORTED"),
    ("cufftResult", "CUFFT_NOT_SUPPORTED"),
    ("cusolverStatus_t", "CUSOLVER_STATUS_NOT_SUPPORTED"),
    ("cusparseStatus_t", "CUSPARSE_STATUS_NOT_SUPPORTED"),
    ("ncclResult_t", "ncclInvalidUsage"),
    ("nvrtcResult", "NVRTC_ERROR_INTERNAL_ERROR"),
    ("CUptiResult", "CUPTI_ERROR_NOT_SUPPORTED"),
    ("nvmlReturn_t", "NVML_ERROR_NOT_SUPPORTED"),
    ("CUfileError_t", "CU_FILE_PLATFORM_NOT_SUPPORTED"),
    // NVSHMEM and cuFile report errors as negative numbers.
    ("int", "-1"),
    ("ssize_t", "-1"),
    ("", "0"),
];

/// Libraries with handles, as `libs::Library` calls them.
const LIBRARIES: [(&str, &str); 6] = [
    ("cublas", "Blas"),
    ("cublasLt", "BlasLt"),
    ("cudnn", "Dnn"),
    ("cusolver", "Solver"),
    ("cusparse", "Sparse"),
    ("cupti", "Cupti"),
];

/// Enumerations whose names are answers.
const STATUSES: [&str; 5] =
    ["CUBLAS_STATUS_", "CUDNN_STATUS_", "CUSPARSE_STATUS_", "CUPTI_ERROR_", "NVRTC_"];

fn main() {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=api");
    println!("cargo:rerun-if-changed=src");
    // The library answers for the driver: whoever opens libcuda.so.1 must find this copy and no
    // other. It has handed out function pointers, so it never goes away.
    for arg in ["-soname,libcuda.so.1", "-Bsymbolic", "-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{arg}");
    }

    let api = read_api(&root.join("api"));
    let mut hand = HandWritten::default();
    find_hand_written(&root.join("src"), &api, &mut hand);
    let HandWritten { all: mut hand, entries: declared } = hand;
    let (behaviour, twins) = read_behaviour(&root.join("api/behaviour.tsv"), &api, &hand);
    for twin in &twins {
        twin.check(&api, &declared);
        hand.insert(twin.symbol.clone());
    }

    write_if_changed(&out.join("twins.rs"), &write_twins(&twins));
    write_if_changed(&out.join("stubs.rs"), &stubs(&api, &hand, &behaviour));
    write_if_changed(&out.join("entry.rs"), &entries(&root.join("api"), &api));
    write_if_changed(&out.join("layout.rs"), &layouts(&root.join("api/layouts.tsv")));
    write_if_changed(&out.join("constants.rs"), &constants(&api));
}

fn rows(path: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .collect()
}

/// Leaves an unchanged file alone, so that cargo doesn't compile it again.
fn write_if_changed(path: &Path, text: &str) {
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

fn read_api(folder: &Path) -> Api {
    let mut prototypes: BTreeMap<String, Vec<Prototype>> = BTreeMap::new();
    let mut symbols = BTreeMap::new();
    for row in rows(&folder.join("prototypes.tsv")) {
        let [symbol, library, _, returns, ..] = &row[..] else { panic!("prototypes.tsv: {row:?}") };
        let params = row.get(4).map_or("", String::as_str);
        let params = params.split(';').filter(|p| !p.is_empty()).map(|p| {
            let mut parts = p.splitn(3, ':');
            let mut next = || parts.next().unwrap_or_default().to_owned();
            Param { name: next(), abi: next() }
        });
        symbols.insert(symbol.clone(), library.clone());
        prototypes.entry(symbol.clone()).or_default().push(Prototype {
            returns: returns.split_once(':').map_or("", |(_, t)| t).to_owned(),
            params: params.collect(),
        });
    }
    for row in rows(&folder.join("imports.tsv")) {
        symbols.entry(row[0].clone()).or_insert_with(|| row[1].clone());
    }
    let constants = rows(&folder.join("constants.tsv"))
        .into_iter()
        .map(|row| (row[0].clone(), row[1].parse().expect("constants.tsv: a number")))
        .collect();
    Api { prototypes, constants, symbols }
}

/// Names of API functions that the sources define.
#[derive(Default)]
struct HandWritten {
    all: BTreeSet<String>,
    /// Those that stand in `entries!` or `queries!`, which may have twins.
    entries: BTreeSet<String>,
}

fn find_hand_written(folder: &Path, api: &Api, found: &mut HandWritten) {
    for entry in fs::read_dir(folder).expect("src").map(|e| e.expect("src").path()) {
        if entry.is_dir() {
            find_hand_written(&entry, api, found);
        } else if entry.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&entry).expect("a source file");
            for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
                for (at, _) in line.match_indices("fn ") {
                    let name: String = line[at + 3..]
                        .chars()
                        .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                        .collect();
                    if api.symbols.contains_key(&name) {
                        if line.trim_start().starts_with("fn ") {
                            found.entries.insert(name.clone());
                        }
                        found.all.insert(name);
                    }
                }
            }
        }
    }
}

struct Behaviour {
    class: String,
    details: Vec<(String, String)>,
}

type Behaviours = BTreeMap<String, Behaviour>;

fn read_behaviour(path: &Path, api: &Api, hand: &BTreeSet<String>) -> (Behaviours, Vec<Twin>) {
    let (mut all, mut twins) = (BTreeMap::new(), Vec::new());
    let mut seen = BTreeSet::new();
    for row in rows(path) {
        let class = row.get(1).unwrap_or_else(|| panic!("behaviour.tsv: {row:?} has no class"));
        let symbols = expand(&row[0]);
        let is_twin = class == "twin";
        for symbol in &symbols {
            // Headers name the newest version of a function; programs
            // built long ago ask for others.
            let known = |name: &str| api.symbols.contains_key(name);
            assert!(
                known(symbol) || is_twin && known(unversioned(symbol)),
                "behaviour.tsv: no function {symbol}"
            );
            assert!(!hand.contains(symbol), "behaviour.tsv: {symbol} is written by hand as well");
            assert!(seen.insert(symbol.clone()), "behaviour.tsv: {symbol} twice");
        }
        let details = row[if is_twin { 3 } else { 2 }.min(row.len())..].iter();
        let details: Vec<(String, String)> = details
            .filter(|detail| !detail.is_empty())
            .map(|detail| {
                let (name, value) = detail.split_once('=').unwrap_or((detail, ""));
                (name.trim().to_owned(), value.trim().to_owned())
            })
            .collect();
        if is_twin {
            let drivers = row.get(2).map(|drivers| expand(drivers)).unwrap_or_default();
            assert_eq!(symbols.len(), drivers.len(), "behaviour.tsv: {row:?}: one twin each");
            for (symbol, driver) in symbols.into_iter().zip(drivers) {
                let first = details.iter().find(|(name, _)| name == "first");
                let first = first.map(|(_, n)| n.parse().expect("first=N: a number"));
                twins.push(Twin { symbol, driver, first });
            }
        } else {
            for symbol in symbols {
                all.insert(symbol, Behaviour { class: class.clone(), details: details.clone() });
            }
        }
    }
    (all, twins)
}

/// A runtime function that does what a driver function does.
struct Twin {
    symbol: String,
    driver: String,
    /// How many parameters count, if the others differ.
    first: Option<usize>,
}

impl Twin {
    /// Its row names an entry, and the parameters are passed in the same way.
    fn check(&self, api: &Api, declared: &BTreeSet<String>) {
        let Self { symbol, driver, .. } = self;
        assert!(declared.contains(driver), "behaviour.tsv: {symbol}: no entry {driver} in src/");
        let theirs = api.prototypes.get(driver).map_or(&[][..], Vec::as_slice);
        for mine in api.prototypes.get(symbol).map_or(&[][..], Vec::as_slice) {
            assert!(
                theirs.iter().any(|theirs| self.passed(mine) == self.passed(theirs)),
                "behaviour.tsv: {symbol} ({:?}) has other parameters than {driver} ({:?})",
                mine.abi(),
                theirs.iter().map(Prototype::abi).collect::<Vec<_>>(),
            );
        }
    }

    /// How the parameters that count are passed. Addresses may be pointers or numbers, and a
    /// pointer may say or not how much it leads to.
    fn passed<'a>(&self, prototype: &'a Prototype) -> Vec<&'a str> {
        let word = |abi: &'a str| if abi.starts_with("ptr") { "i64" } else { abi };
        let abi = prototype.abi().into_iter().map(word);
        abi.take(self.first.unwrap_or(usize::MAX)).collect()
    }
}

/// `twins!` declares the runtime functions that are twins of the driver function it is given.
fn write_twins(twins: &[Twin]) -> String {
    let mut of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for twin in twins {
        of.entry(&twin.driver).or_default().push(&twin.symbol);
    }
    let mut out =
        String::from("// Made by build.rs from api/behaviour.tsv.\nmacro_rules! twins {\n");
    for (driver, symbols) in of {
        line!(out, "    ($how:ident {driver} $($rest:tt)*) => {{");
        for symbol in symbols {
            line!(out, "        entry! {{ Runtime $how {symbol} $($rest)* }}");
        }
        line!(out, "    }};");
    }
    line!(out, "    ($($alone:tt)*) => {{}};\n}}");
    out
}

/// `a{b,c}d` is `abd` and `acd`.
fn expand(pattern: &str) -> Vec<String> {
    let Some((head, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let (choices, tail) = rest.split_once('}').expect("behaviour.tsv: a brace is not closed");
    let tails = expand(tail);
    choices
        .split(',')
        .flat_map(|choice| tails.iter().map(move |tail| format!("{head}{choice}{tail}")))
        .collect()
}

fn stubs(api: &Api, hand: &BTreeSet<String>, behaviour: &BTreeMap<String, Behaviour>) -> String {
    let mut out = String::from("// Made by build.rs from api/*.tsv.\n");
    let mut targets = BTreeSet::new();
    let mut unsupported = 0;
    for (symbol, library) in api.symbols.iter().filter(|(symbol, _)| !hand.contains(*symbol)) {
        if let Some(rule) = behaviour.get(symbol) {
            behave(&mut out, api, symbol, library, rule);
        } else if let Some(target) = same_interface(api, hand, symbol) {
            line!(
                out,
                "#[unsafe(no_mangle)]\n#[unsafe(naked)]\npub extern \"C\" fn {symbol}() {{\n    \
                 core::arch::naked_asm!(\"{JUMP} {{}}\", sym {target})\n}}"
            );
            targets.insert(target);
        } else {
            let code = unsupported_code(api, symbol, library);
            line!(
                out,
                "#[unsafe(no_mangle)]\npub extern \"C\" fn {symbol}() -> i64 {{\n    \
                 crate::stub::unsupported(&WARNED[{unsupported}], \"{symbol}\", {code})\n}}"
            );
            unsupported += 1;
        }
    }
    line!(out, "unsafe extern \"C\" {{");
    for target in targets {
        line!(out, "    fn {target}();");
    }
    line!(
        out,
        "}}\nstatic WARNED: [core::sync::atomic::AtomicBool; {unsupported}] =\n    \
         [const {{ core::sync::atomic::AtomicBool::new(false) }}; {unsupported}];"
    );
    out
}

/// An unconditional branch of the target architecture.
const JUMP: &str = if cfg!(target_arch = "aarch64") { "b" } else { "jmp" };

/// The function written by hand that a name may stand for: the one for the legacy default stream,
/// or another version of the same name with the same parameters.
fn same_interface(api: &Api, hand: &BTreeSet<String>, symbol: &str) -> Option<String> {
    // NCCL's second name for everything, for profilers that take the first.
    if let Some(plain) = symbol.strip_prefix('p').filter(|s| s.starts_with("nccl")) {
        return hand.contains(plain).then(|| plain.to_owned());
    }
    let plain = symbol.strip_suffix("_ptsz").or_else(|| symbol.strip_suffix("_ptds"));
    if let Some(plain) = plain.filter(|plain| hand.contains(*plain)) {
        return Some(plain.to_owned());
    }
    let plain = plain.unwrap_or(symbol);
    if api.symbols[symbol] != "cuda" {
        return None;
    }
    let base = unversioned(plain);
    let mine = api.prototypes.get(symbol)?;
    let versions = (2..9).map(|n| format!("{base}_v{n}")).chain([base.to_owned()]);
    versions.filter(|v| v != symbol && hand.contains(v)).find(|version| {
        let theirs = api.prototypes.get(version).map_or(&[][..], Vec::as_slice);
        mine.iter().any(|m| theirs.iter().any(|t| m.abi() == t.abi()))
    })
}

/// `cuMemAlloc_v2` is a version of `cuMemAlloc`.
fn unversioned(symbol: &str) -> &str {
    match symbol.rsplit_once("_v") {
        Some((base, number)) if number.parse::<u32>().is_ok() => base,
        _ => symbol,
    }
}

fn unsupported_code(api: &Api, symbol: &str, library: &str) -> i64 {
    let returns = match api.prototypes.get(symbol) {
        Some(prototypes) => prototypes[0].returns.as_str(),
        None => match library {
            "cudart" => "cudaError_t",
            "nccl" => "ncclResult_t",
            _ => "int",
        },
    };
    let name = UNSUPPORTED.iter().find(|(t, _)| *t == returns).map_or("0", |(_, name)| name);
    name.parse().unwrap_or_else(|_| {
        *api.constants.get(name).unwrap_or_else(|| panic!("constants.tsv has no {name}"))
    })
}

/// The function of a row of `behaviour.tsv`.
fn behave(out: &mut String, api: &Api, symbol: &str, library: &str, rule: &Behaviour) {
    let prototype = api.prototypes.get(symbol).and_then(|p| p.first());
    let prototype = prototype.unwrap_or_else(|| panic!("behaviour.tsv: {symbol} has no prototype"));
    let params = &prototype.params;
    let named = |name: &str| {
        let at = params.iter().position(|p| p.name == name);
        at.unwrap_or_else(|| panic!("behaviour.tsv: {symbol} has no parameter {name}"))
    };
    // Where the caller's places are, and what they hold.
    let mut places: BTreeMap<usize, String> = BTreeMap::new();
    let mut body = String::new();
    let library = LIBRARIES.iter().find(|(name, _)| *name == library).map(|(_, variant)| variant);
    let call = |function: &str, arguments: &[usize]| {
        let library = library.unwrap_or_else(|| panic!("behaviour.tsv: {symbol}: no handles"));
        let arguments: Vec<String> =
            arguments.iter().map(|at| format!("r#{}", params[*at].name)).collect();
        let arguments = arguments.join(", ");
        format!("crate::libs::{function}(crate::libs::Library::{library}, {arguments})")
    };
    let mut numbers = false;
    for (name, value) in &rule.details {
        if name == "result" {
            let (place, size) = value.split_once(':').expect("result=PARAM:BYTES");
            places.insert(named(place), "u8".to_owned());
            line!(body, "    crate::stub::result(r#{place}, ({size}) as usize);");
            numbers |= size.parse::<usize>().is_err();
        } else {
            let size = pointee(&params[named(name)]);
            places.insert(named(name), format!("i{}", size * 8));
            line!(body, "    crate::stub::put(r#{name}, {value});");
            numbers = true;
        }
    }
    let handle = "*mut core::ffi::c_void".to_owned();
    body += &match rule.class.as_str() {
        "set" | "out" => "0".to_owned(),
        "compute" | "launch" => call("compute", &[0]),
        "close" | "destroy" => call(&rule.class, &[0]),
        "stream" => call("set_stream", &[0, 1]),
        "get-stream" => {
            places.insert(1, "u64".to_owned());
            call("get_stream", &[0, 1])
        }
        "open" | "create" => {
            assert_eq!(pointee(&params[0]), 8, "behaviour.tsv: {symbol}: not a handle");
            places.insert(0, handle.clone());
            call(&rule.class, &[0])
        }
        other => panic!("behaviour.tsv: {symbol}: no class is called {other}"),
    };
    let mut declared = String::new();
    let mut conversions = String::new();
    for (at, p) in params.iter().enumerate() {
        let t = match (places.get(&at), p.abi.as_str()) {
            (Some(inner), _) => format!("crate::gpu::boundary::Out<{inner}>"),
            (None, "i32" | "i64" | "f32" | "f64") => p.abi.clone(),
            (None, abi) if abi.starts_with("ptr") => handle.clone(),
            (None, abi) => panic!("behaviour.tsv: {symbol}: a parameter is a record ({abi})"),
        };
        write!(declared, "r#{}: {t}, ", p.name).expect("a string");
        if numbers && t.starts_with('i') {
            line!(conversions, "    let r#{0} = i64::from(r#{0});", p.name);
        }
    }
    line!(
        out,
        "#[unsafe(no_mangle)]\npub extern \"C\" fn {symbol}({declared}) -> i32 {{\n    \
         use crate::libs::model::*;\n{conversions}    {body}\n}}"
    );
}

/// How many bytes a caller's pointer leads to.
fn pointee(param: &Param) -> usize {
    let inner = param.abi.strip_prefix("ptr[").and_then(|t| t.strip_suffix(']'));
    inner
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("{} is no out-parameter", param.name))
}

/// Only of the driver: name, first CUDA version, symbol, symbol for per-thread default streams.
fn entries(folder: &Path, api: &Api) -> String {
    let mut used = BTreeSet::new();
    let mut list = Vec::new();
    for row in rows(&folder.join("driver_versions.tsv")) {
        let version: u32 = row[1].parse().expect("driver_versions.tsv: a version");
        let thread = row.get(3).filter(|t| api.symbols.contains_key(*t)).unwrap_or(&row[2]);
        used.extend([row[2].clone(), thread.clone()]);
        list.push((row[0].clone(), version, row[2].clone(), thread.clone()));
    }
    list.sort();
    let mut out =
        String::from("// Made by build.rs from api/driver_versions.tsv.\nunsafe extern \"C\" {\n");
    for symbol in &used {
        line!(out, "    fn {symbol}();");
    }
    line!(out, "}}\nstatic ENTRIES: [Entry; {}] = [", list.len());
    for (name, version, symbol, thread) in &list {
        line!(
            out,
            "    Entry {{ name: \"{name}\", version: {version}, symbol: \"{symbol}\", \
             plain: {symbol}, per_thread: {thread} }},"
        );
    }
    out.push_str("];\n");
    out
}

/// Fields of a record: name (none for the whole), offset, size.
type Fields = Vec<(String, usize, usize)>;
type Records = BTreeMap<String, Fields>;

fn layouts(path: &Path) -> String {
    let mut toolkits: BTreeMap<u32, Records> = BTreeMap::new();
    let mut newest = 0;
    for row in rows(path) {
        let [toolkit, record, field, offset, size] = &row[..] else {
            panic!("layouts.tsv: {row:?}")
        };
        let (major, minor) = toolkit.split_once('.').expect("layouts.tsv: a version");
        let number = |text: &str| text.parse::<u32>().expect("layouts.tsv: a number");
        newest = newest.max(number(major) * 1000 + number(minor) * 10);
        let records = toolkits.entry(number(major)).or_default();
        let fields = records.entry(record.clone()).or_default();
        fields.push((field.clone(), number(offset) as usize, number(size) as usize));
    }
    let mut out = String::from("// Made by build.rs from api/layouts.tsv.\n");
    line!(
        out,
        "/// The newest toolkit whose headers the tables were made from, as `cudaDriverGetVersion`"
    );
    line!(out, "/// writes it.\npub const NEWEST_TOOLKIT: i32 = {newest};");
    for (major, records) in &toolkits {
        line!(out, "/// As CUDA {major} lays records out.\npub mod cuda{major} {{");
        layout(&mut out, records);
    }
    // What a later toolkit changes goes from here, and who relied on it doesn't compile any more.
    let mut common = toolkits.pop_first().map(|(_, records)| records).unwrap_or_default();
    for records in toolkits.values() {
        for (record, fields) in &mut common {
            if let Some(others) = records.get(record) {
                fields.retain(|field| others.contains(field));
            }
        }
        for (record, fields) in records {
            common.entry(record.clone()).or_insert_with(|| fields.clone());
        }
    }
    line!(out, "/// What every version has in the same place.\npub mod all {{");
    layout(&mut out, &common);
    out
}

/// The inside of a module of records.
fn layout(out: &mut String, records: &Records) {
    for (record, fields) in records {
        line!(out, "    pub mod {record} {{");
        for (field, offset, size) in fields {
            let name = field.replace('.', "_");
            if field.is_empty() {
                line!(out, "        pub const SIZE: usize = {size};");
            } else {
                line!(
                    out,
                    "        pub const r#{name}: crate::layout::Field = crate::layout::Field {{ \
                     offset: {offset}, size: {size} }};"
                );
            }
        }
        out.push_str("    }\n");
    }
    out.push_str("}\n");
}

fn constants(api: &Api) -> String {
    let mut out = String::from("// Made by build.rs from api/constants.tsv.\n");
    let mut names = Vec::new();
    for (name, value) in &api.constants {
        let t = if i32::try_from(*value).is_ok() { "i32" } else { "i64" };
        line!(out, "pub const {name}: {t} = {value};");
        if STATUSES.iter().any(|prefix| name.starts_with(prefix)) {
            names.push(name);
        }
    }
    line!(out, "static STATUS_NAMES: [(i32, &core::ffi::CStr); {}] = [", names.len());
    for name in names {
        line!(out, "    ({name}, c\"{name}\"),");
    }
    line!(out, "];");
    out
}
