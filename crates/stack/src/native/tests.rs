//! The walk against the system's unwinder, and what is remembered against a walk from nothing.

mod deep;
mod odd;
mod system;

use super::*;
use crate::registers::registers;
use crate::room::Bounds;
use crate::testing::zeroed;
use proptest::prelude::*;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

fn pcs(frames: &[Native]) -> Vec<u64> {
    frames.iter().map(|f| f.pc).collect()
}

/// What a thread has, and how often its memory was of use.
struct Walker {
    room: Box<Room>,
    cache: Box<Cache>,
    afresh: Box<Cache>,
    found: Box<Found>,
    walks: usize,
    /// Walks of which it was said beforehand that they would be as the last one.
    again: usize,
    kept: usize,
    frames: usize,
}

fn a_room() -> Box<Room> {
    let room: Box<Room> = zeroed();
    room.furnish();
    room.enter();
    room
}

impl Walker {
    fn new() -> Walker {
        Walker {
            room: a_room(),
            cache: zeroed(),
            afresh: zeroed(),
            found: zeroed(),
            walks: 0,
            again: 0,
            kept: 0,
            frames: 0,
        }
    }

    /// Walks from one place with and without memory, and compares.
    #[inline(never)]
    fn check(&mut self) {
        let here = registers();
        self.check_from(here);
    }

    /// The same from a frame that is still active. Returns whether it was said
    /// beforehand that nothing has changed.
    #[inline(never)]
    fn check_from(&mut self, here: Registers) -> bool {
        self.afresh.clear();
        let again = self.cache.is_unchanged(here);
        let before = again.then(|| pcs(self.cache.frames()));
        for _ in 0..2 {
            assert_eq!(walk(&self.room, here, &mut self.cache, &mut self.found), None);
            assert!(self.cache.is_unchanged(here));
        }
        assert!(before.is_none_or(|before| before == pcs(self.cache.frames())));
        self.again += usize::from(again);
        assert_ne!(self.cache.generation, 0, "the rules are known everywhere in a test program");
        assert_eq!(walk(&self.room, here, &mut self.afresh, &mut self.found), None);
        assert_eq!(self.afresh.kept(), 0);
        self.walks += 1;
        self.kept += self.cache.kept();
        self.frames += self.cache.len;
        let (known, fresh) = (self.cache.frames(), self.afresh.frames());
        assert_eq!(pcs(known), pcs(fresh));
        for (i, (a, b)) in known.iter().zip(fresh).enumerate() {
            let matters = self.afresh.steps[i].fp_matters;
            assert_eq!((a.sp, matters), (b.sp, self.cache.steps[i].fp_matters));
            assert!(a.fp == b.fp || !matters);
        }
        assert_eq!(self.cache.checks[..known.len()], self.afresh.checks[..known.len()]);
        assert_eq!(self.cache.own_len, self.afresh.own_len);
        assert_eq!(self.cache.own[..self.cache.own_len], self.afresh.own[..self.afresh.own_len]);
        assert!(known.windows(2).all(|w| w[0].sp > w[1].sp), "further out is further up");
        again
    }

    /// The same, against the system's unwinder, which is slower, and
    /// against the walk for odd stacks.
    #[inline(never)]
    fn check_with_system(&mut self) {
        assert_eq!(walk(&self.room, registers(), &mut self.cache, &mut self.found), None);
        system::frames(&mut self.found);
        self.compare();
        assert_eq!(odd_walk(&self.room, &mut self.found), None);
        self.compare();
    }

    fn compare(&mut self) {
        // SAFETY: in a test, no frames are taken for memtrace's own.
        unsafe { self.afresh.extend(0, &self.found) };
        let (known, system) = (self.cache.frames(), self.afresh.frames());
        let n = known.len() - 1;
        assert_eq!(pcs(&known[..n]), pcs(&system[..n]));
        for (a, b) in known[..n].iter().zip(&system[..n]) {
            assert_eq!(a.sp, b.sp);
        }
    }
}

unsafe extern "C" {
    fn setjmp(env: *mut c_void) -> c_int;
    fn longjmp(env: *mut c_void, value: c_int) -> !;
}

thread_local! {
    static WALKER: RefCell<Option<Walker>> = const { RefCell::new(None) };
}

fn check() {
    WALKER.with_borrow_mut(|w| w.get_or_insert_with(Walker::new).check());
}

/// A random tree of calls, with a check at some of its nodes. Every kind
/// of call leaves another kind of frame.
fn tree(rng: &mut Rng, depth: u32) -> u64 {
    if rng.below(3) == 0 {
        check();
    }
    if depth == 0 {
        return 0;
    }
    let mut sum = 0;
    for _ in 0..=rng.below(3) {
        let down = depth - 1;
        sum += match rng.below(11) {
            0 => black_box(tree(rng, down)),
            1 => (black_box(tree as fn(&mut Rng, u32) -> u64))(rng, down),
            2 => black_box(large_frame(rng, down)),
            3 => black_box(aligned_frame(rng, down)),
            4 => [down].iter().map(|d| tree(rng, *d)).sum(),
            5 => by_exception(rng, down),
            6 => through_c(rng, down),
            7 => with_another_fp(rng, down),
            8 => own_tree(rng, down),
            9 => with_more_room(rng, down),
            _ => by_jump(rng, down),
        };
    }
    check_now_and_then(rng);
    sum + 1
}

fn check_now_and_then(rng: &mut Rng) {
    if rng.below(4) == 0 {
        check();
    }
}

#[inline(never)]
fn large_frame(rng: &mut Rng, depth: u32) -> u64 {
    let space = black_box([depth as u8; 3000]);
    tree(rng, depth) + u64::from(space[5] == 77)
}

#[inline(never)]
fn aligned_frame(rng: &mut Rng, depth: u32) -> u64 {
    #[repr(align(64))]
    struct Wide([u8; 128]);
    let wide = black_box(Wide([depth as u8; 128]));
    tree(rng, depth) + u64::from(wide.0[3] == 77)
}

/// Leaves its callees by an exception.
#[inline(never)]
fn by_exception(rng: &mut Rng, depth: u32) -> u64 {
    let thrown = catch_unwind(AssertUnwindSafe(|| {
        let sum = tree(rng, depth);
        check_now_and_then(rng);
        if sum > 1 {
            resume_unwind(Box::new(sum));
        }
        sum
    }));
    thrown.unwrap_or_else(|e| *e.downcast().expect("what was thrown"))
}

/// Comes back through the C library.
#[inline(never)]
fn through_c(rng: &mut Rng, depth: u32) -> u64 {
    thread_local!(static ARGS: std::cell::Cell<(*mut Rng, u32)> = const { std::cell::Cell::new((std::ptr::null_mut(), 0)) });
    unsafe extern "C" fn order(_: *const c_void, _: *const c_void) -> c_int {
        let (rng, depth) = ARGS.get();
        // SAFETY: set below, and in use by nobody else meanwhile.
        black_box(tree(unsafe { &mut *rng }, depth));
        0
    }
    let before = ARGS.replace((rng, depth));
    let mut numbers = [2, 1];
    // SAFETY: an array of two elements and a comparison for them.
    unsafe { libc::qsort(numbers.as_mut_ptr().cast(), 2, 4, Some(order)) };
    ARGS.set(before);
    1
}

type Callee = unsafe extern "C-unwind" fn(*mut c_void, u64) -> u64;

/// A function that calls another one with this in the frame pointer, as compilers do
/// that use the register for anything.
macro_rules! with_fp {
    ($(#[$section:meta])* $name:ident) => {
        #[unsafe(naked)]
        $(#[$section])*
        unsafe extern "C-unwind" fn $name(fp: u64, a: *mut c_void, b: u64, f: Callee) -> u64 {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "push rbp",
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rdi",
                "mov rdi, rsi",
                "mov rsi, rdx",
                "call rcx",
                "pop rbp",
                ".cfi_def_cfa_offset 8",
                ".cfi_restore rbp",
                "ret",
                ".cfi_endproc",
            )
        }
    };
}

with_fp!(with_fp);
with_fp!(
    #[unsafe(link_section = "memtrace_own")]
    own_with_fp
);

/// Calls `f` with so many bytes more on the stack, which only the frame pointer tells:
/// compilers do so for variable arrays.
#[unsafe(naked)]
unsafe extern "C-unwind" fn with_room(bytes: u64, a: *mut c_void, b: u64, f: Callee) -> u64 {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "sub rsp, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "call rcx",
        "leave",
        ".cfi_def_cfa rsp, 8",
        ".cfi_restore rbp",
        "ret",
        ".cfi_endproc",
    )
}

/// Calls [`unchanged`], and leaves the frame pointer alone.
#[unsafe(naked)]
unsafe extern "C-unwind" fn handing_on(walker: *mut c_void, from: u64) -> u64 {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        "call {f}",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "ret",
        ".cfi_endproc",
        f = sym unchanged,
    )
}

unsafe extern "C-unwind" fn tree_of(rng: *mut c_void, depth: u64) -> u64 {
    // SAFETY: what `with_fp` was given, which nobody else uses meanwhile.
    black_box(tree(unsafe { &mut *rng.cast::<Rng>() }, depth as u32))
}

#[inline(never)]
fn with_another_fp(rng: &mut Rng, depth: u32) -> u64 {
    let fp = rng.below(1 << 40);
    // SAFETY: a function for these arguments.
    unsafe { with_fp(fp, std::ptr::from_mut(rng).cast(), u64::from(depth), tree_of) }
}

#[inline(never)]
fn with_more_room(rng: &mut Rng, depth: u32) -> u64 {
    let bytes = rng.below(4) * 16;
    // SAFETY: a function for these arguments.
    unsafe { with_room(bytes, std::ptr::from_mut(rng).cast(), u64::from(depth), tree_of) }
}

// Code that stands for memtrace's own has a section for itself, of which the linker knows the ends.
unsafe extern "C" {
    static __start_memtrace_own: u8;
    static __stop_memtrace_own: u8;
}

pub fn own_code() -> (u64, u64) {
    (&raw const __start_memtrace_own as u64, &raw const __stop_memtrace_own as u64)
}

/// A hook that takes a stack, or calls what calls others: code of
/// memtrace's own is anywhere in the stack.
#[inline(never)]
#[unsafe(link_section = "memtrace_own")]
fn own_tree(rng: &mut Rng, depth: u32) -> u64 {
    own_check(rng.below(3) as u32);
    let sum = if depth > 0 { black_box(tree(rng, depth)) } else { 0 };
    own_check(0);
    sum + 1
}

#[inline(never)]
#[unsafe(link_section = "memtrace_own")]
fn own_check(depth: u32) {
    if depth > 0 {
        black_box(own_check)(depth - 1);
        return;
    }
    let here = registers();
    WALKER.with_borrow_mut(|w| w.get_or_insert_with(Walker::new).check_from(here));
}

/// Leaves its callees by longjmp. They are plain functions without anything to drop.
#[inline(never)]
fn by_jump(rng: &mut Rng, depth: u32) -> u64 {
    #[repr(C, align(16))]
    struct Env([u64; 64]);
    #[inline(never)]
    unsafe fn jump(rng: &mut Rng, env: *mut c_void, depth: u32) -> u64 {
        if depth == 0 {
            check();
            // SAFETY: the caller's caller is still active.
            unsafe { longjmp(env, 1) }
        }
        check_now_and_then(rng);
        // SAFETY: as above.
        black_box(unsafe { jump(rng, env, depth - 1) }) + 1
    }
    let mut env = Env([0; 64]);
    let at = (&raw mut env).cast();
    // SAFETY: the environment is larger than glibc's, and the frame stays until the jump is over.
    // No variable that changes is used after it.
    unsafe {
        if setjmp(at) == 0 {
            black_box(jump(rng, at, depth.min(3)));
        }
    }
    check();
    0
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// How many walks in how many threads: more with `MEMTRACE_TEST_WALKS`.
fn wanted() -> usize {
    std::env::var("MEMTRACE_TEST_WALKS").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000)
}

#[test]
fn what_is_remembered_is_what_a_new_walk_finds() {
    let _steady = crate::testing::steady();
    let threads: Vec<_> = (1..=2)
        .map(|seed| {
            std::thread::Builder::new().stack_size(64 << 20).spawn(move || {
                let mut rng = Rng(0x9e37_79b9_7f4a_7c15 ^ seed);
                let walks = || WALKER.with_borrow(|w| w.as_ref().map_or(0, |w| w.walks));
                while walks() < wanted() / 2 {
                    let depth = 2 + rng.below(7) as u32;
                    black_box(tree(&mut rng, depth));
                }
                WALKER.with_borrow(|w| w.as_ref().map(|w| (w.walks, w.kept, w.frames, w.again)))
            })
        })
        .collect();
    for thread in threads {
        let (walks, kept, frames, again) =
            thread.expect("a thread").join().expect("no panic").expect("walks");
        println!("{walks} walks of {frames} frames, {kept} of them kept; {again} as the last one");
        assert!(again > 0, "that is said now and then");
        assert!(kept * 10 > frames * 7, "the memory is of use");
    }
}

/// Where a walk begins: here, in a frame of memtrace's own, or in the frame outside of this one.
const HERE: u64 = 0;
const OWN_FRAME: u64 = 1;
const OUTSIDE: u64 = 2;

/// Is it said that nothing has changed since the last time?
unsafe extern "C-unwind" fn unchanged(walker: *mut c_void, from: u64) -> u64 {
    // SAFETY: what the caller was given, which nobody else uses meanwhile.
    let walker = unsafe { &mut *walker.cast::<Walker>() };
    if from == OWN_FRAME {
        // SAFETY: a function for these arguments.
        return unsafe { own_with_fp(7, (&raw mut *walker).cast(), 0, black_box(own_unchanged)) };
    }
    let mut here = registers();
    if from == OUTSIDE {
        assert_eq!(walk(&walker.room, here, &mut walker.afresh, &mut walker.found), None);
        let outside = walker.afresh.frames()[walker.afresh.len - 2];
        here = Registers { pc: outside.pc, sp: outside.sp, fp: outside.fp };
        walker.afresh.clear();
    }
    u64::from(walker.check_from(here))
}

#[unsafe(link_section = "memtrace_own")]
unsafe extern "C-unwind" fn own_unchanged(walker: *mut c_void, _: u64) -> u64 {
    // SAFETY: as above.
    u64::from(unsafe { &mut *walker.cast::<Walker>() }.check_from(registers()))
}

/// Calls [`handing_on`] from a frame that keeps the frame pointer and puts something else into it.
unsafe extern "C-unwind" fn keeping(walker: *mut c_void, from: u64) -> u64 {
    // SAFETY: a function for these arguments.
    unsafe { with_fp(8, walker, from, black_box(handing_on)) }
}

#[test]
fn a_frame_pointer_that_does_not_matter_is_not_compared() {
    let _steady = crate::testing::steady();
    for from in [HERE, OWN_FRAME, OUTSIDE] {
        let mut walker = Walker::new();
        let again: Vec<u64> = (0..20)
            .map(|fp| {
                let walker = (&raw mut walker).cast();
                // SAFETY: a function for these arguments.
                unsafe { with_fp(black_box(fp * 0x1_0101), walker, from, black_box(handing_on)) }
            })
            .collect();
        assert_eq!(again.iter().sum::<u64>(), 19, "all but the first");
        assert_eq!(walker.cache.own_len > 0, from == OWN_FRAME);
    }
}

/// Two frames that take the same room together, but not each. What is left of one call is not
/// overwritten by the next: the words of the last walk are all as they were.
#[inline(never)]
fn in_two_rooms(walker: &mut Walker, first: u64, from: u64, then: Callee) -> u64 {
    struct Rest<'a>(&'a mut Walker, u64, Callee);
    unsafe extern "C-unwind" fn second(rest: *mut c_void, first: u64) -> u64 {
        // SAFETY: what is given below, and functions for these arguments.
        unsafe {
            let Rest(walker, from, then) = &mut *rest.cast::<Rest<'_>>();
            with_room(8192 - first * 1024, (&raw mut **walker).cast(), *from, *then)
        }
    }
    let mut rest = Rest(walker, from, then);
    // SAFETY: as above.
    unsafe { with_room(first * 1024, (&raw mut rest).cast(), first, black_box(second)) }
}

#[test]
fn a_frame_pointer_that_matters_is_compared() {
    let _steady = crate::testing::steady();
    for (from, then) in
        [HERE, OWN_FRAME, OUTSIDE].map(|f| [(f, handing_on as Callee), (f, keeping)]).concat()
    {
        let mut walker = Walker::new();
        let rooms = black_box(vec![1, 1, 2, 2, 1, 3]);
        let again: Vec<u64> =
            rooms.iter().map(|n| in_two_rooms(&mut walker, *n, from, black_box(then))).collect();
        assert_eq!(again, [0, 1, 0, 1, 0, 0], "from {from}");
    }
}

#[test]
fn a_frame_pointer_that_comes_to_matter_is_read_again() {
    let _steady = crate::testing::steady();
    for from in [HERE, OWN_FRAME, OUTSIDE] {
        let mut walker = Walker::new();
        for n in black_box(vec![0_u64, 0, 1, 2, 1, 0, 2, 2, 1, 1]) {
            let walker = (&raw mut walker).cast();
            // SAFETY: functions for these arguments.
            unsafe {
                match n {
                    0 => with_room(0, walker, from, black_box(handing_on)),
                    _ => with_fp(n * 0x101, walker, from, black_box(handing_on)),
                }
            };
        }
    }
}

fn shapes(seed: u64, depth: u32, walker: &mut Walker) {
    if depth == 0 {
        walker.check_with_system();
        return;
    }
    let next = seed / 4;
    match seed % 4 {
        0 => shapes(next, depth - 1, walker),
        1 => {
            let space = black_box([seed as u8; 5000]);
            shapes(next, depth - 1, walker);
            black_box(space[9]);
        }
        2 => (black_box(shapes as fn(u64, u32, &mut Walker)))(next, depth - 1, walker),
        _ => [next].iter().for_each(|s| shapes(*s, depth - 1, walker)),
    }
    black_box(depth);
}

proptest! {
    #[test]
    fn the_rules_agree_with_the_system(seeds in prop::collection::vec((any::<u64>(), 0_u32..24), 1..6)) {
        let mut walker = Walker::new();
        for (seed, depth) in seeds {
            shapes(seed, depth, &mut walker);
        }
    }
}

#[test]
fn a_stack_that_is_not_the_threads_own_is_walked_all_the_same() {
    let mut walker = Walker::new();
    walker.room.pretend(Bounds { low: 1 << 20, high: 2 << 20, proven: 2 << 20 });
    let here = registers();
    assert_eq!(
        by_rules(&walker.room, here, &mut walker.cache, generation(), &mut walker.found),
        None
    );
    assert_eq!(walk(&walker.room, registers(), &mut walker.cache, &mut walker.found), None);
    assert!(walker.cache.len > 3);
    assert_eq!((walker.cache.generation, walker.cache.kept), (0, 0), "nothing to go by next time");
}

#[test]
fn reads_stay_inside_the_stack() {
    let mut walker = Walker::new();
    let here = registers();
    assert!(walker.room.in_use(here.sp).contains(&here.sp));
    let low = here.sp - 4096;
    walker.room.pretend(Bounds { low, high: here.sp + 64, proven: low });
    let reached = by_rules(&walker.room, here, &mut walker.cache, generation(), &mut walker.found);
    assert_eq!(reached, None, "the outer frames are beyond the bounds");
}

#[test]
fn a_word_that_changed_is_noticed() {
    let _steady = crate::testing::steady();
    // A remembered walk with one word changed afterwards, at each place in turn.
    let mut walker = Walker::new();
    walker.check();
    let n = walker.cache.len - 3;
    let changed = |cache: &Cache| {
        // SAFETY: the frames from the third on further out are those of this function's callers.
        unsafe { changed(&cache.checks[..n]) }
    };
    for i in (0..n).rev() {
        assert_eq!(changed(&walker.cache), None);
        let check = walker.cache.checks[i];
        let others = [
            Check { pc: check.pc ^ 1, ..check },
            Check { fp: check.fp ^ 1, ..check },
            Check::never(),
        ];
        for other in others {
            walker.cache.checks[i] = other;
            assert_eq!(changed(&walker.cache), Some(i));
        }
        walker.cache.checks[i] = check;
    }
}
