//! Native frames of the calling thread: return addresses, and how far out each frame reaches.
//!
//! The walk follows the rules of [`super::rules`] and reads nothing but the thread's own stack, between its
//! stack pointer and the stack's end: a wrong rule can give a wrong frame, but never a fault. Where a rule is
//! unknown, or the thread runs on a stack that isn't its own (fibers, signal stacks), the whole stack is
//! taken by the system's unwinder instead, which is slower but knows all there is to know: generated code that
//! was registered with it, signal frames, odd tables.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::stacks::Reason;

use super::deep::Deep;
use super::rules::{Outcome, Registers, Rule, object_at, rule_for};

/// A native frame.
#[derive(Clone, Copy, Default)]
pub struct Native {
    /// The address that its callee returns to.
    pub pc: u64,
    /// The stack address at which its caller's frame begins.
    pub end: u64,
}

/// The stack of a thread: from the lowest address to the one after the highest.
#[derive(Clone, Copy, Default)]
pub struct Bounds {
    low: u64,
    high: u64,
}

impl Bounds {
    /// The calling thread's stack. Slow (for the main thread, the C library reads a file): once a thread.
    pub fn of_thread() -> Bounds {
        // SAFETY: an all-zero attribute object is only written to; it is destroyed if it was filled in.
        unsafe {
            let mut attr: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attr) != 0 {
                return Bounds::default();
            }
            let (mut at, mut size) = (std::ptr::null_mut::<c_void>(), 0);
            let known =
                libc::pthread_attr_getstack(&raw const attr, &raw mut at, &raw mut size) == 0;
            libc::pthread_attr_destroy(&raw mut attr);
            if known {
                Bounds { low: at as u64, high: at as u64 + size as u64 }
            } else {
                Bounds::default()
            }
        }
    }
}

/// More frames than this are never followed.
const MAX_FRAMES: usize = 1 << 14;

/// Walks the calling thread's frames, innermost first, into `out`, without memtrace's own at the inner end.
/// Returns why it does not reach the outermost.
#[inline(never)]
pub fn walk<const HALF: usize>(bounds: Bounds, out: &mut Deep<Native, HALF>) -> Option<Reason> {
    if fast(bounds, out) {
        return None;
    }
    by_system(out)
}

/// The walk by rules; false if it has to be done otherwise.
#[inline(never)]
pub fn fast<const HALF: usize>(bounds: Bounds, out: &mut Deep<Native, HALF>) -> bool {
    out.clear();
    let Some(mut here) = registers() else { return false };
    // The main thread's stack grows, so its low end is where we are.
    if here.sp >= bounds.high || here.sp + (1 << 30) < bounds.low {
        return false;
    }
    let low = here.sp;
    let read = |at: u64| {
        let inside = at >= low && at <= bounds.high - 8;
        // SAFETY: the bytes between the stack pointer and the end of the thread's stack are mapped and readable.
        inside.then(|| unsafe { (at as *const u64).read_unaligned() })
    };
    let own = own_code();
    for _ in 0..MAX_FRAMES {
        let step = rule_for(here.pc).step(here, read);
        let end = match step {
            Outcome::Caller(caller) => caller.sp,
            Outcome::End => bounds.high,
            Outcome::Unknown => return false,
        };
        if !(out.is_empty() && (own.0..own.1).contains(&here.pc)) {
            out.push(Native { pc: here.pc, end });
        }
        match step {
            Outcome::Caller(caller) => here = caller,
            _ => return true,
        }
    }
    false
}

/// The registers as they are when this function has returned to its caller.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
#[allow(clippy::unnecessary_wraps, reason = "other architectures have none")]
fn registers() -> Option<Registers> {
    let mut r = Registers { pc: 0, sp: 0, fp: 0 };
    // SAFETY: writes three words.
    unsafe { caller_registers(&raw mut r.pc, &raw mut r.sp, &raw mut r.fp) };
    Some(r)
}

/// On other architectures the system's unwinder takes every stack.
#[cfg(not(target_arch = "x86_64"))]
fn registers() -> Option<Registers> {
    None
}

/// Stores what the caller's instruction pointer, stack pointer and frame pointer are once this has returned: a
/// return address, where unwind tables are exact.
///
/// # Safety
/// The pointers must be writable.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn caller_registers(pc: *mut u64, sp: *mut u64, fp: *mut u64) {
    core::arch::naked_asm!(
        "mov rax, [rsp]",
        "mov [rdi], rax",
        "lea rax, [rsp + 8]",
        "mov [rsi], rax",
        "mov [rdx], rbp",
        "ret",
    )
}

/// The range of memtrace's own library; empty if it is part of the program, as in its tests.
fn own_code() -> (u64, u64) {
    static START: AtomicU64 = AtomicU64::new(0);
    static END: AtomicU64 = AtomicU64::new(0);
    let end = END.load(Ordering::Acquire);
    if end != 0 {
        return (START.load(Ordering::Relaxed), end);
    }
    let object = object_at(own_code as *const () as u64).filter(|o| !o.main);
    let (start, end) = object.map_or((1, 1), |o| (o.start, o.end));
    START.store(start, Ordering::Relaxed);
    END.store(end, Ordering::Release);
    (start, end)
}

/// The system's unwinder's context of a frame.
enum Context {}
type Visit = unsafe extern "C-unwind" fn(*mut Context, *mut c_void) -> c_int;

unsafe extern "C-unwind" {
    fn _Unwind_Backtrace(visit: Visit, arg: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut Context, before: *mut c_int) -> usize;
    fn _Unwind_GetCFA(context: *mut Context) -> usize;
}

const CONTINUE: c_int = 0;
const STOP: c_int = 4;

/// The walk by the system's unwinder.
#[inline(never)]
pub fn by_system<const HALF: usize>(out: &mut Deep<Native, HALF>) -> Option<Reason> {
    struct Walk<'a, const HALF: usize> {
        out: &'a mut Deep<Native, HALF>,
        own: (u64, u64),
        pending: u64,
        seen: usize,
    }
    unsafe extern "C-unwind" fn visit<const HALF: usize>(
        context: *mut Context,
        walk: *mut c_void,
    ) -> c_int {
        let mut exact = 0;
        // SAFETY: the unwinder hands in its context and our own pointer.
        let (walk, pc, sp) = unsafe {
            (
                &mut *walk.cast::<Walk<'_, HALF>>(),
                _Unwind_GetIPInfo(context, &raw mut exact) as u64,
                _Unwind_GetCFA(context) as u64,
            )
        };
        walk.add_pending(sp);
        // A frame that a signal interrupted is at an instruction, not behind a call.
        walk.pending = if exact == 0 || pc == 0 { pc } else { pc + 1 };
        walk.seen += 1;
        if walk.seen < MAX_FRAMES { CONTINUE } else { STOP }
    }
    impl<const HALF: usize> Walk<'_, HALF> {
        fn add_pending(&mut self, end: u64) {
            let ours = (self.own.0..self.own.1).contains(&self.pending);
            if self.pending != 0 && !(self.out.is_empty() && ours) {
                self.out.push(Native { pc: self.pending, end });
            }
        }
    }
    out.clear();
    let mut walk = Walk { out, own: own_code(), pending: 0, seen: 0 };
    // SAFETY: `visit` gets the pointer to `walk`, which outlives the call, and doesn't unwind.
    unsafe { _Unwind_Backtrace(visit::<HALF>, (&raw mut walk).cast()) };
    walk.add_pending(u64::MAX);
    let outermost = walk.pending;
    // It also ends, without a word, where it finds no table.
    let whole = walk.seen < MAX_FRAMES && (outermost == 0 || rule_for(outermost) == Rule::END);
    (!whole).then_some(Reason::Truncated)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::hint::black_box;

    type Frames = Deep<Native, 256>;

    fn pcs(deep: &Frames) -> Vec<u64> {
        (0..deep.len()).map(|i| deep.get(i).pc).collect()
    }

    /// Both walks from one place: below here they differ, above they must agree.
    #[inline(never)]
    fn compare(bounds: Bounds) -> usize {
        let mut a: Box<Frames> = crate::stack::testing::zeroed();
        let mut b: Box<Frames> = crate::stack::testing::zeroed();
        assert!(fast(bounds, &mut a), "the rules are known everywhere in a test program");
        assert_eq!(by_system(&mut b), None);
        let (a_pcs, b_pcs) = (pcs(&a), pcs(&b));
        // Innermost: the walker itself, then this function at two places; then the same.
        assert_eq!(a_pcs[2..], b_pcs[2..]);
        for i in 2..a.len() - 1 {
            assert_eq!(a.get(i).end, b.get(i).end, "frame {i}");
            assert!(a.get(i).end > a.get(i - 1).end);
        }
        black_box(a_pcs.len())
    }

    fn shapes(seed: u64, depth: u32, bounds: Bounds) -> usize {
        if depth == 0 {
            return compare(bounds);
        }
        let next = seed / 5;
        let below = match seed % 5 {
            0 => shapes(next, depth - 1, bounds),
            1 => {
                // A large frame.
                let space = black_box([seed as u8; 5000]);
                shapes(next, depth - 1, bounds) + usize::from(space[9] == 1)
            }
            2 => (black_box(shapes as fn(u64, u32, Bounds) -> usize))(next, depth - 1, bounds),
            3 => [next].iter().map(|s| shapes(*s, depth - 1, bounds)).sum(),
            _ => {
                // A frame that is aligned more than the stack is.
                #[repr(align(64))]
                struct Wide([u8; 128]);
                let wide = black_box(Wide([seed as u8; 128]));
                shapes(next, depth - 1, bounds) + usize::from(wide.0[3] == 1)
            }
        };
        black_box(below)
    }

    proptest! {
        #[test]
        fn the_rules_agree_with_the_system(seed in any::<u64>(), depth in 0_u32..24) {
            prop_assert!(shapes(seed, depth, Bounds::of_thread()) > depth as usize);
        }
    }

    #[test]
    fn callbacks_through_the_c_library_are_walked() {
        unsafe extern "C" fn order(a: *const c_void, b: *const c_void) -> c_int {
            compare(Bounds::of_thread());
            // SAFETY: qsort hands in elements of the array.
            unsafe { a.cast::<i32>().read() - b.cast::<i32>().read() }
        }
        let mut numbers = [3, 1, 2];
        // SAFETY: an array of three elements and a comparison for them.
        unsafe { libc::qsort(numbers.as_mut_ptr().cast(), 3, 4, Some(order)) };
        assert_eq!(numbers, [1, 2, 3]);
    }

    #[test]
    fn a_stack_that_is_not_the_threads_own_is_left_to_the_system() {
        let mut out: Box<Frames> = crate::stack::testing::zeroed();
        let elsewhere = Bounds { low: 1 << 20, high: 2 << 20 };
        assert!(!fast(elsewhere, &mut out));
        assert_eq!(walk(elsewhere, &mut out), None);
        assert!(out.len() > 3);
    }

    #[test]
    fn a_deep_recursion_keeps_both_ends() {
        fn down(n: u32, bounds: Bounds, out: &mut Frames) -> u32 {
            if n == 0 {
                assert_eq!(walk(bounds, out), None);
                return 0;
            }
            black_box(down(n - 1, bounds, out)) + 1
        }
        std::thread::Builder::new()
            .stack_size(32 << 20)
            .spawn(|| {
                let bounds = Bounds::of_thread();
                let (mut near, mut far): (Box<Frames>, Box<Frames>) =
                    (crate::stack::testing::zeroed(), crate::stack::testing::zeroed());
                down(3, bounds, &mut near);
                down(5000, bounds, &mut far);
                assert_eq!(far.gap(), Some(256));
                assert_eq!(near.gap(), None);
                let (near, far) = (pcs(&near), pcs(&far));
                assert_eq!(near[..4], far[..4]);
                // The thread's start and what the standard library puts there.
                assert_eq!(near[near.len() - 4..], far[far.len() - 4..]);
            })
            .expect("a thread")
            .join()
            .expect("no panic");
    }

    #[test]
    fn reads_stay_inside_the_stack() {
        let bounds = Bounds::of_thread();
        let here = registers().expect("x86-64");
        assert!(here.sp > bounds.low && here.sp < bounds.high);
        let short = Bounds { low: bounds.low, high: here.sp + 64 };
        let mut out: Box<Frames> = crate::stack::testing::zeroed();
        assert!(!fast(short, &mut out), "the outer frames are beyond the bounds");
    }
}
