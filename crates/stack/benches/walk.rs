//! What a native stack costs, beside the walk of the crate `backtrace`, in one run.
//! `cargo bench -p memtrace-stack`.
//!
//! At a depth of so many frames of Rust a stack is taken in four ways:
//!
//! * after everything that the thread remembered was forgotten;
//! * from two functions in turn, so that all but the inner end is known;
//! * from one place again and again, which is found to be the same;
//! * by `backtrace::trace_unsynchronized`, which visits each frame and writes nothing down.
//!
//! Rounds of the four follow each other, and the figure is the median of all rounds. What
//! forgetting takes is measured apart and taken off.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use memtrace_stack::{Mine, Mode, Regions, Site, Stacks};

thread_local!(static MINE: Mine = const { Mine::new() });

const ROUNDS: usize = 200;
/// Stacks of a round, an even number.
const TIMES: u32 = 200;

fn main() {
    memtrace_libraries::loading();
    let stacks = Regions::anonymous().and_then(Stacks::new).expect("address space");
    println!(
        "| frames | from nothing, ns | another leaf | the same again | `backtrace` | of that: from nothing | another leaf | the same |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for depth in [10, 40, 80] {
        let [nothing, leaf, same, system] = at_depth(depth, &mut || measure(&stacks));
        let [a, b, c] = [nothing, leaf, same].map(|ns| ns / system);
        println!(
            "| {depth} | {nothing:.0} | {leaf:.0} | {same:.0} | {system:.0} | {a:.3} | {b:.3} | {c:.3} |"
        );
    }
}

/// Calls itself so often; each call has a frame of its own.
#[inline(never)]
fn at_depth<T>(frames: u32, then: &mut dyn FnMut() -> T) -> T {
    let result = if frames <= 1 { then() } else { at_depth(frames - 1, then) };
    black_box(result)
}

fn take(stacks: &Stacks) {
    black_box(MINE.with(|mine| stacks.capture(Mode::All, Site::Alloc, mine)));
}

#[inline(never)]
fn one_leaf(stacks: &Stacks) {
    take(black_box(stacks));
    black_box(1);
}

#[inline(never)]
fn another_leaf(stacks: &Stacks) {
    take(black_box(stacks));
    black_box(2);
}

fn forget() {
    MINE.with(Mine::forget);
}

/// By the system's unwinder.
fn visit() {
    let mut frames = 0_u32;
    // SAFETY: this is the only thread.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            frames += u32::from(!frame.ip().is_null());
            true
        });
    }
    black_box(frames);
}

/// Nanoseconds a stack: from nothing, from another leaf each time, from the same place, and by
/// `backtrace`.
fn measure(stacks: &Stacks) -> [f64; 4] {
    let mut rounds: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let ways: [&mut dyn FnMut(u32); 5] = [
            &mut |_| {
                forget();
                take(stacks);
            },
            &mut |i| if i % 2 == 0 { one_leaf(stacks) } else { another_leaf(stacks) },
            &mut |_| take(stacks),
            &mut |_| visit(),
            &mut |_| forget(),
        ];
        for (way, times) in ways.into_iter().zip(&mut rounds) {
            way(0);
            way(1);
            let start = Instant::now();
            (0..TIMES).for_each(&mut *way);
            times.push(start.elapsed().as_nanos() as f64 / f64::from(TIMES));
        }
    }
    let [nothing, leaf, same, system, forgetting] = rounds.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    [nothing - forgetting, leaf, same, system]
}
