//! Prints the stack of this very thread, as it is under a few functions. `cargo run -p
//! memtrace-stack --example stack`.

use std::hint::black_box;

use memtrace_format::stacks::{RawFrame, StackId, frames};
use memtrace_stack::{Mine, Mode, Regions, Site, Stacks};
use memtrace_symbols::{Namer, Splice};

thread_local!(static MINE: Mine = const { Mine::new() });

#[inline(never)]
fn innermost(stacks: &Stacks) -> StackId {
    black_box(MINE.with(|mine| stacks.capture(Mode::All, Site::Alloc, mine)))
}

#[inline(never)]
fn under(depth: u32, stacks: &Stacks) -> StackId {
    black_box(if depth == 0 { innermost(stacks) } else { under(depth - 1, stacks) })
}

fn main() {
    memtrace_libraries::loading();
    let stacks = Regions::anonymous().and_then(Stacks::new).expect("address space");
    // The same stack is the same number.
    let [id, again] = [0; 2].map(|_| under(3, &stacks));
    assert_eq!(id, again);

    let [depot, codes, modules] = stacks.words();
    println!("stack {id}:");
    for frame in Namer::new(depot, codes, modules, Splice::Evaluation).frames(id) {
        println!("  {} in {}", frame.name, frame.filename);
    }
    // What names leave out: why there are no Python frames.
    for word in frames(depot, id).unwrap_or_default() {
        if let Some(RawFrame::Missing(reason)) = RawFrame::unpack(word) {
            println!("  [{}]", reason.text());
        }
    }
}
