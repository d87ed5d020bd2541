//! More frames than are kept: the inner and the outer ones stay.

use std::hint::black_box;

use super::{HALF, MAX, Walker, pcs, walk};
use crate::registers::registers;

fn down(n: u32, walker: &mut Walker) -> u32 {
    if n == 0 {
        assert_eq!(walk(&walker.room, registers(), &mut walker.cache, &mut walker.found), None);
        return 0;
    }
    black_box(down(n - 1, walker)) + 1
}

#[test]
fn a_deep_recursion_keeps_both_ends() {
    let _steady = crate::testing::steady();
    let thread = std::thread::Builder::new().stack_size(32 << 20).spawn(|| {
        let mut walker = Walker::new();
        let mut all = Vec::new();
        // Up to, across and back over the limit: what is remembered makes no difference.
        for depth in [3, 300, 500, 5000, 480, 495, 496, 497, 498, 499, 500, 501, 502, 503, 504, 3] {
            let mut both = Vec::new();
            for forget in black_box(vec![false, true]) {
                if forget {
                    walker.cache.clear();
                }
                down(depth, &mut walker);
                let mut frames = pcs(walker.cache.frames());
                frames.pop(); // where the walk begins
                both.push((frames, walker.cache.gap()));
            }
            assert!(both[0] == both[1], "depth {depth}");
            let (known, gap) = both.swap_remove(0);
            all.push((known, gap));
        }
        let (near, far) = (&all[0].0, &all[3].0);
        assert_eq!((all[0].1, all[3].1, far.len()), (None, Some(HALF), MAX - 1));
        assert_eq!(near[near.len() - 3..], far[far.len() - 3..]);
        assert_eq!(near[..4], far[..4], "the thread's start");
    });
    thread.expect("a thread").join().expect("no panic");
}
