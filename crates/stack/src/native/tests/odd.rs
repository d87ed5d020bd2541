//! The walk for odd stacks: where a thread left its own stack, and tables that are anything.

use std::cell::Cell;
use std::hint::black_box;

use proptest::prelude::*;

use super::super::odd;
use super::{Found, Native, Walker, pcs};
use crate::registers::{Here, stack_pointer};
use crate::{rules, tables};
use memtrace_libraries::objects::Object;
use memtrace_os::checked::{Memory, Window};

fn frames(found: &Found) -> Vec<u64> {
    (0..found.0.len()).map(|i| found.0.get(i).frame.pc).collect()
}

#[inline(never)]
fn on_another_stack(walker: &mut Walker) {
    let Walker { room, found, .. } = walker;
    assert_eq!(super::odd_walk(room, found), None);
    let here = frames(found);
    let reached = room.run(|| black_box(super::odd_walk(room, found)));
    assert_eq!(reached, None);
    let there = frames(found);
    // Apart from the frames of this function, which calls from two places.
    let n = here.len().min(there.len()) - 4;
    assert_eq!(here[here.len() - n..], there[there.len() - n..]);
    assert!(here.len().abs_diff(there.len()) < 4, "{} and {} frames", here.len(), there.len());
}

#[test]
fn a_walk_on_a_stack_of_ours_begins_where_the_thread_left_its_own() {
    let _steady = crate::testing::steady();
    on_another_stack(&mut Walker::new());
}

#[test]
fn work_inside_of_work_stays_where_it_is_and_a_third_level_too() {
    let walker = Walker::new();
    let room = &walker.room;
    let place = || room.left_at(stack_pointer() as u64).is_some();
    assert!(!place());
    let (inside, nested) = room.run(|| (place(), room.run(place)));
    assert!(inside && nested);
    assert_eq!(room.run(|| 7), 7);
    let panics = std::panic::AssertUnwindSafe(|| room.run(|| panic!("as it must")));
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(room.run(place), "it is free again");
}

/// Some bytes at an address, and nothing else.
struct Made(u64, Vec<u8>);

impl Memory for Made {
    fn copy(&self, at: u64, to: &[Cell<u64>]) -> bool {
        for (i, cell) in to.iter().enumerate() {
            let word = at
                .checked_sub(self.0)
                .and_then(|start| self.1.get(start as usize + 8 * i..)?.first_chunk::<8>());
            let Some(word) = word else { return false };
            cell.set(u64::from_ne_bytes(*word));
        }
        true
    }
}

const AT: u64 = 0x10_0000;
const SIZE: usize = 4096;

/// Unwind tables as compilers write them: an index of one entry, a common part,
/// and an entry with these instructions.
fn tables_with(common: &[u8], own: &[u8]) -> Vec<u8> {
    let mut t = vec![1, 0x1b, 3, 0x3b];
    t.extend(28_i32.to_ne_bytes()); // from here to the entries
    t.extend(1_u32.to_ne_bytes());
    t.extend(0x1000_i32.to_ne_bytes());
    let entry_place = t.len();
    t.extend([0; 4]);
    t.resize(32, 0);
    let entry = |id: &dyn Fn(usize) -> u32, head: &[u8], code: &[u8], t: &mut Vec<u8>| {
        let start = t.len();
        t.extend([0; 4]);
        t.extend(id(t.len()).to_ne_bytes());
        t.extend(head);
        t.extend(code);
        t.resize(t.len().next_multiple_of(8), 0);
        let length = (t.len() - start - 4) as u32;
        t[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        start
    };
    entry(&|_| 0, &[1, b'z', b'R', 0, 1, 0x78, 16, 1, 0], common, &mut t);
    let at = t.len();
    let mut head = 0x10_1000_u64.to_ne_bytes().to_vec();
    head.extend(0x1000_u64.to_ne_bytes());
    head.push(0);
    entry(&|place| place as u32 - 32, &head, own, &mut t);
    t[entry_place..entry_place + 4].copy_from_slice(&(at as i32).to_ne_bytes());
    t
}

/// What the tables say of one address, by a rule and by a whole step from made-up registers.
fn ask(mut bytes: Vec<u8>, stack: &[u8]) -> (Option<rules::Rule>, Option<Here>) {
    bytes.resize(SIZE, 0);
    bytes.extend(stack);
    bytes.resize(2 * SIZE, 0);
    let memory = Made(AT, bytes);
    let object = Object { start: AT, end: AT + 0x10_0000, eh_frame_hdr: AT };
    let rule = tables::in_object(&Window::new(&memory), &object, 0x10_1800, rules::translate);
    let step = odd::step_in(&Window::new(&memory), &object, 0x10_1800, AT + SIZE as u64);
    (rule, step)
}

#[test]
fn made_up_tables_are_read() {
    // The caller's frame 8 bytes up, the return address below it; then 16.
    let (rule, step) = ask(tables_with(&[0x0c, 7, 8, 0x90, 1], &[0x0e, 16]), &[7; 64]);
    assert!(rule.is_some_and(|rule| rule != rules::Rule::UNKNOWN));
    let step = step.expect("a caller").registers();
    assert_eq!((step.pc, step.sp), (0x0707_0707_0707_0707, AT + SIZE as u64 + 16));
    // The same by an expression: the stack pointer, and 16 more.
    let (rule, by_expression) =
        ask(tables_with(&[0x0c, 7, 8, 0x90, 1], &[0x0f, 2, 0x77, 16]), &[7; 64]);
    assert_eq!(rule, Some(rules::Rule::UNKNOWN));
    assert_eq!(by_expression.map(|here| here.registers()), Some(step));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 2_000 } else { 20_000 }))]

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600), stack in prop::collection::vec(any::<u8>(), 0..300)) {
        ask(bytes, &stack);
    }

    #[test]
    fn any_instructions_are_survived(
        common in prop::collection::vec(any::<u8>(), 0..24),
        own in prop::collection::vec(any::<u8>(), 0..120),
        changes in prop::collection::vec((0..250_usize, any::<u8>()), 0..4),
        stack in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = tables_with(&common, &own);
        for (at, byte) in changes {
            let n = bytes.len();
            bytes[at % n] = byte;
        }
        ask(bytes, &stack);
    }
}

/// The same bytes, and zeros everywhere else.
struct Endless(Made);

impl Memory for Endless {
    fn copy(&self, at: u64, to: &[Cell<u64>]) -> bool {
        if !self.0.copy(at, to) {
            for cell in to {
                cell.set(0);
            }
        }
        true
    }
}

#[test]
fn a_long_row_of_nothing_ends() {
    // An entry that claims to be a gigabyte of "nothing happens".
    let mut bytes = tables_with(&[], &[]);
    let n = bytes.len();
    bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
    bytes[n - 48..n - 44].copy_from_slice(&0x4000_0000_u32.to_ne_bytes());
    let memory = Endless(Made(AT, bytes));
    let object = Object { start: AT, end: u64::MAX, eh_frame_hdr: AT };
    let said = tables::in_object(&Window::new(&memory), &object, 0x10_1800, |_| ());
    assert_eq!(said, None);
}

#[test]
fn what_is_found_has_the_frames_of_this_test() {
    let mut walker = Walker::new();
    let Walker { room, found, .. } = &mut walker;
    assert_eq!(super::odd_walk(room, found), None);
    let native: Vec<Native> = (0..found.0.len()).map(|i| found.0.get(i).frame).collect();
    assert_eq!(pcs(&native).len(), found.0.len());
    assert!(native.windows(2).all(|w| w[0].sp < w[1].sp), "innermost first");
}
