//! Stacks of this very program, in the situations that hooks get into.

use std::cell::RefCell;
use std::ffi::{CString, c_int, c_void};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memtrace_format::snapshot::Frame;
use memtrace_format::stacks::{DEPOT_FULL, frames};
use memtrace_symbols::{Namer, Splice};

use super::*;
use memtrace_libraries::objects;

fn stacks() -> Stacks {
    Stacks::new(Regions::anonymous().expect("address space")).expect("fresh regions")
}

fn capture(stacks: &Stacks, mode: Mode) -> StackId {
    thread_local!(static MINE: Mine = const { Mine::new() });
    MINE.with(|mine| stacks.capture(mode, Site::Alloc, mine))
}

fn namer(stacks: &Stacks) -> Namer<&'static [AtomicU64]> {
    let [depot, codes, modules] = stacks.words();
    Namer::new(depot, codes, modules, Splice::Evaluation)
}

fn names(stacks: &Stacks, id: StackId) -> Vec<Frame> {
    namer(stacks).frames(id)
}

/// Where a function's name appears in a stack.
fn at(frames: &[Frame], name: &str) -> usize {
    frames
        .iter()
        .position(|f| f.name.contains(name))
        .unwrap_or_else(|| panic!("{name} is not among {frames:#?}"))
}

#[inline(never)]
fn inner(stacks: &Stacks, mode: Mode) -> StackId {
    black_box(capture(stacks, mode))
}

#[inline(never)]
fn middle(stacks: &Stacks, mode: Mode) -> StackId {
    black_box(inner(stacks, mode))
}

#[inline(never)]
fn another(stacks: &Stacks, mode: Mode) -> StackId {
    black_box(inner(black_box(stacks), mode))
}

#[inline(never)]
fn outer(stacks: &Stacks, f: fn(&Stacks, Mode) -> StackId) -> StackId {
    black_box(f(stacks, Mode::All))
}

#[test]
fn a_stack_has_the_names_of_its_callers_innermost_first() {
    let stacks = stacks();
    let id = outer(&stacks, middle);
    let frames = names(&stacks, id);
    assert!(at(&frames, "tests::inner") < at(&frames, "tests::middle"));
    assert!(at(&frames, "tests::middle") < at(&frames, "tests::outer"));
    let exe = std::env::current_exe().expect("a path");
    assert_eq!(Path::new(&frames[at(&frames, "tests::inner")].filename), exe);
    // Offsets are those in the file, which is what its symbols have.
    let object = objects::object_at(inner as *const () as u64).expect("loaded");
    let offset = inner as *const () as u64 - object.start;
    let line = frames[at(&frames, "tests::inner")].line;
    assert!((offset..offset + 200).contains(&line), "{line} is not in the function at {offset}");
}

/// A stack of ours, and of the crate `backtrace` from the same function.
#[inline(never)]
fn by_both(stacks: &Stacks) -> (StackId, Vec<(u64, Option<String>)>) {
    let id = black_box(capture(stacks, Mode::All));
    let mut others = Vec::new();
    backtrace::trace(|frame| {
        // Functions that were inlined come first; the symbol's own is the last.
        let mut name = None;
        backtrace::resolve_frame(frame, |symbol| name = symbol.name().map(|n| format!("{n:#}")));
        others.push((frame.ip().addr() as u64, name));
        true
    });
    (id, others)
}

#[inline(never)]
fn below_both(stacks: &Stacks, depth: u32) -> (StackId, Vec<(u64, Option<String>)>) {
    if depth == 0 { by_both(stacks) } else { black_box(below_both(stacks, depth - 1)) }
}

#[test]
fn another_unwinder_finds_the_same_frames_and_names() {
    let stacks = stacks();
    let (id, others) = below_both(&stacks, 20);
    let words = frames(stacks.depot.words(), id).expect("readable");
    let shown = names(&stacks, id);
    let ours: Vec<(u64, &str)> = words
        .iter()
        .zip(&shown)
        .filter_map(|(word, frame)| match RawFrame::unpack(*word) {
            Some(RawFrame::Native { pc, .. }) => Some((pc, frame.name.as_str())),
            _ => None,
        })
        .collect();
    // What is further in than the function that asked both differs.
    let begin = ours.iter().position(|(_, name)| name.contains("tests::below_both"));
    let ours = &ours[begin.expect("it is there")..];
    let begin = others.iter().position(|(pc, _)| *pc == ours[0].0).expect("the same address");
    let others = &others[begin..];
    assert!(ours.len() > 25, "{ours:#?}");
    let mut named = 0;
    // The outermost one may have no caller that is described.
    for (ours, others) in ours[..ours.len() - 1].iter().zip(others) {
        assert_eq!(ours.0, others.0, "{ours:?} and {others:?}");
        // Functions that the C library doesn't show may be known from its debug information.
        if let Some(name) = others.1.as_deref().filter(|_| ours.1 != "??") {
            assert_eq!(ours.1, name);
            named += 1;
        }
    }
    assert!(others.len().abs_diff(ours.len()) <= 1, "{ours:#?}\n{others:#?}");
    assert!(named > 20, "{ours:#?}\n{others:#?}");
}

#[test]
fn equal_stacks_have_one_id_and_share_their_outer_part() {
    let _steady = testing::steady();
    let stacks = stacks();
    let mut ids = Vec::new();
    // One place that calls, whatever the optimiser does.
    let calls: Vec<fn(&Stacks, Mode) -> StackId> = vec![middle, middle, another];
    for f in black_box(calls) {
        let before = stacks.status().nodes.0;
        ids.push((outer(&stacks, f), stacks.status().nodes.0 - before));
    }
    assert_eq!((ids[0].0, ids[1].1), (ids[1].0, 0));
    assert_ne!(ids[2].0, ids[0].0);
    // Those two frames are new, and those of the capture itself stand inside of them.
    let new = at(&names(&stacks, ids[2].0), "tests::another") as u64 + 1;
    assert_eq!(ids[2].1, new);
}

#[test]
fn without_python_the_raw_stack_says_so_and_an_empty_one_shows_it() {
    let stacks = stacks();
    assert_eq!(capture(&stacks, Mode::None), NO_STACK);
    let empty = capture(&stacks, Mode::Python);
    let why = RawFrame::Missing(Reason::NoPython).pack();
    assert_eq!(frames(stacks.depot.words(), empty), Some(vec![why]));
    let shown = names(&stacks, empty);
    assert_eq!(shown.len(), 1);
    assert_eq!(shown[0].name, "[no Python in this process]");
    let all = capture(&stacks, Mode::All);
    assert_eq!(frames(stacks.depot.words(), all).expect("readable").last(), Some(&why));
    assert!(names(&stacks, all).iter().all(|f| !f.name.starts_with('[')));
}

fn fill(stacks: &Stacks, n: u32, last: &mut StackId) -> u32 {
    *last = capture(stacks, Mode::All);
    if n == 0 { 0 } else { black_box(fill(stacks, n - 1, last)) + 1 }
}

#[test]
fn a_full_depot_gives_the_stack_that_says_so() {
    let words = |n: usize| -> &'static [AtomicU64] {
        (0..n).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak()
    };
    let regions = Regions {
        depot: words(80),
        codes: words(4096),
        modules: words(1 << 16),
        space: Space::MEMORY,
    };
    let stacks = Stacks::new(regions).expect("small, but regions");
    assert!(Stacks::new(regions).is_none(), "they are in use now");
    let mut last = 0;
    fill(&stacks, 60, &mut last);
    assert_eq!(last, DEPOT_FULL);
    assert_eq!(names(&stacks, last)[0].name, "[no room for more stacks]");
    assert!(stacks.status().refused > 0);
}

thread_local! {
    static IN_HANDLER: RefCell<Option<(&'static Stacks, StackId)>> = const { RefCell::new(None) };
}

extern "C" fn on_signal(_: c_int) {
    IN_HANDLER.with_borrow_mut(|slot| {
        if let Some((stacks, id)) = slot {
            *id = capture(stacks, Mode::All);
        }
    });
}

/// Takes a stack in a signal handler, on the thread's stack or on one of its own.
#[inline(never)]
fn in_handler(own_stack: bool) -> Vec<Frame> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let stacks: &'static Stacks = Box::leak(Box::new(stacks()));
    IN_HANDLER.set(Some((stacks, 0)));
    let mut space = vec![0_u8; 256 << 10];
    // SAFETY: the handler and the stack outlive the signal, which is
    // raised here; both are taken back.
    unsafe {
        let mut alternative: libc::stack_t = std::mem::zeroed();
        alternative.ss_sp = space.as_mut_ptr().cast();
        alternative.ss_size = space.len();
        let mut old: libc::stack_t = std::mem::zeroed();
        libc::sigaltstack(&raw const alternative, &raw mut old);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = if own_stack { libc::SA_ONSTACK } else { 0 };
        libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
        raise();
        libc::signal(libc::SIGUSR2, libc::SIG_IGN);
        libc::sigaltstack(&raw const old, std::ptr::null_mut());
    }
    let (stacks, id) = IN_HANDLER.take().expect("set above");
    names(stacks, id)
}

#[inline(never)]
fn raise() {
    // SAFETY: a handler is installed.
    black_box(unsafe { libc::raise(libc::SIGUSR2) });
}

#[test]
fn a_stack_in_a_signal_handler_reaches_past_the_signal() {
    for own_stack in [false, true] {
        let frames = in_handler(own_stack);
        assert!(at(&frames, "on_signal") < at(&frames, "tests::raise"));
        assert!(at(&frames, "tests::raise") < at(&frames, "tests::in_handler"));
        assert!(frames.iter().all(|f| !f.name.starts_with('[')), "cut: {frames:#?}");
    }
}

/// Runs `f` below a function that was made at run time and has no unwind tables.
fn below_generated_code(f: extern "C" fn()) {
    // A frame of its own without a frame pointer: sub rsp, 24; call rdi; add rsp, 24; ret.
    let code = [0x48, 0x83, 0xec, 0x18, 0xff, 0xd7, 0x48, 0x83, 0xc4, 0x18, 0xc3_u8];
    // SAFETY: a fresh mapping that gets the code above, which keeps to the
    // C ABI, and is called as such.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        std::ptr::copy_nonoverlapping(code.as_ptr(), at.cast(), code.len());
        let call: extern "C" fn(extern "C" fn()) = std::mem::transmute(at);
        call(f);
        libc::munmap(at, 4096);
    }
}

#[test]
fn code_without_tables_ends_a_stack_with_the_reason() {
    thread_local!(static ID: std::cell::Cell<StackId> = const { std::cell::Cell::new(0) });
    static STACKS: Mutex<Option<Stacks>> = Mutex::new(None);
    #[inline(never)]
    extern "C" fn called_back() {
        let stacks = STACKS.lock().expect("no panic");
        ID.set(inner(stacks.as_ref().expect("set"), Mode::All));
    }
    *STACKS.lock().expect("no panic") = Some(stacks());
    below_generated_code(called_back);
    let stacks = STACKS.lock().expect("no panic").take().expect("set");
    let frames = names(&stacks, ID.get());
    assert!(at(&frames, "tests::inner") < at(&frames, "called_back"));
    let last = frames.last().expect("not empty");
    assert_eq!(last.name, "[the outer frames could not be read]");
    assert!(frames.iter().all(|f| !f.name.contains("below_generated")), "nothing is guessed");
    assert_eq!(frames[frames.len() - 2].filename, "??", "the generated code is in no library");
}

#[test]
fn the_child_of_a_fork_takes_stacks_of_its_own() {
    let parents = stacks();
    outer(&parents, middle);
    // SAFETY: the child does nothing that could wait for another thread of the parent: it
    // allocates, which glibc makes safe, and leaves by _exit.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            let own = stacks();
            let id = outer(&own, middle);
            let frames = names(&own, id);
            let right = frames.iter().any(|f| f.name.contains("tests::middle"))
                && frames.iter().any(|f| f.name.contains("tests::outer"));
            libc::_exit(i32::from(!right));
        }
        let mut status = -1;
        libc::waitpid(pid, &raw mut status, 0);
        assert_eq!(status, 0);
    }
}

/// A library with a function `through`, which calls back from a frame of this size.
fn build(folder: &Path, name: &str, frame: u32) -> PathBuf {
    let (source, library) =
        (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so")));
    let text = format!(
        "int {name}_through(int (*f)(void *), void *x) {{\n\
         volatile char space[{frame}]; space[0] = 1; return f(x) + space[0]; }}\n\
         int through(int (*f)(void *), void *x) {{ return {name}_through(f, x) + 1; }}\n"
    );
    std::fs::write(&source, text).expect("a writable folder");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = std::process::Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-fomit-frame-pointer", "-o"])
        .args([&library, &source])
        .status();
    assert!(status.expect("the C compiler that Rust links with").success());
    library
}

type Through =
    unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;

/// Loads a library, takes a stack below its function, and closes it again, as an interposed
/// `dlclose` would have it. Returns the stack and where the function was.
#[inline(never)]
fn visit(stacks: &Stacks, library: &Path) -> (StackId, usize) {
    struct Visit<'a>(&'a Stacks, StackId);
    unsafe extern "C" fn called_back(visit: *mut c_void) -> c_int {
        // SAFETY: the pointer that `visit` passes through.
        let visit = unsafe { &mut *visit.cast::<Visit<'_>>() };
        visit.1 = inner(visit.0, Mode::All);
        0
    }
    let path = CString::new(library.as_os_str().as_encoded_bytes()).expect("no zero in it");
    let mut visit = Visit(stacks, 0);
    // SAFETY: the library was built above, and its function has this type.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!handle.is_null());
        let function = libc::dlsym(handle, c"through".as_ptr());
        let through: Through = std::mem::transmute(function);
        through(called_back, (&raw mut visit).cast());
        closing(Some(stacks), || libc::dlclose(handle));
        (visit.1, function as usize)
    }
}

#[test]
fn a_library_that_takes_the_place_of_another_is_not_mistaken_for_it() {
    let _alone = testing::alone();
    let folder = std::env::temp_dir().join(format!("memtrace-stack-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a writable folder");
    let libraries: Vec<_> =
        [("small", 16), ("larger", 400), ("large", 5000)].map(|(n, s)| build(&folder, n, s)).into();
    let stacks = stacks();
    let mut seen = Vec::new();
    for round in 0..30 {
        let library = &libraries[round % libraries.len()];
        let (id, place) = visit(&stacks, library);
        seen.push((library, id, place));
    }
    std::fs::remove_dir_all(&folder).expect("it is there");
    let places: std::collections::HashSet<_> = seen.iter().map(|s| s.2).collect();
    assert!(places.len() < 20, "no address was used twice: nothing was checked");
    let mut namer = namer(&stacks);
    for (library, id, _) in seen {
        let frames = namer.frames(id);
        let first = at(&frames, "tests::inner");
        assert!(frames[first + 1].name.contains("called_back"));
        // The files are gone, so there are no names; but the paths are
        // known, and the frames go on beyond.
        assert_eq!(Path::new(&frames[first + 2].filename), library);
        assert_eq!(Path::new(&frames[first + 3].filename), library);
        assert!(frames[first + 4].name.contains("tests::visit"), "{frames:#?}");
    }
}

fn down(stacks: &Stacks, path: u32, depth: u32) -> StackId {
    match (depth, path & 1) {
        (0, _) => inner(stacks, Mode::All),
        (_, 0) => black_box(left(stacks, path >> 1, depth - 1)),
        _ => black_box(right(stacks, path >> 1, depth - 1)),
    }
}

#[inline(never)]
fn left(stacks: &Stacks, path: u32, depth: u32) -> StackId {
    black_box(down(stacks, path, depth))
}

#[inline(never)]
fn right(stacks: &Stacks, path: u32, depth: u32) -> StackId {
    black_box(down(stacks, path, depth))
}

#[test]
fn many_threads_take_stacks_at_once() {
    let _steady = testing::steady();
    let stacks: &'static Stacks = Box::leak(Box::new(stacks()));
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            std::thread::spawn(move || {
                let mut state: u32 = seed;
                (0..500)
                    .map(|_| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let path = state >> 20 & 0xff;
                        (path, down(stacks, path, 8))
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    let mut namer = namer(stacks);
    let mut ids = std::collections::HashMap::new();
    for thread in threads {
        for (path, id) in thread.join().expect("no panic") {
            assert_eq!(*ids.entry(path).or_insert(id), id, "one path, one stack");
        }
    }
    for (path, id) in ids {
        let turns: Vec<u32> = namer
            .frames(id)
            .iter()
            .rev()
            .filter_map(|f| match &f.name {
                n if n.contains("::left") => Some(0),
                n if n.contains("::right") => Some(1),
                _ => None,
            })
            .collect();
        assert_eq!(turns, (0..8).map(|i| path >> i & 1).collect::<Vec<_>>());
    }
}
