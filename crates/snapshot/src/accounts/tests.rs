//! The table from hand-made events: it adds up, whatever happened, and
//! charges what changed to what came or went.

use memtrace_format::event::{
    BlockEvent, CompletedEvent, FLAG_OF_BLOCKS, FLAG_PENDING, HostBlockEvent, HostFreeEvent, Layer,
    MeasuredEvent, Pool, ReadyEvent, WaitEvent,
};
use memtrace_format::made::Made;
use memtrace_format::stacks::RawFrame;
use memtrace_symbols::{Namer, Splice};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn event(kind: Kind, what: What) -> Event {
    Event { api: 1, what, thread: 1, ..Event::new(kind, Layer::Device) }
}

fn take(addr: u64, size: u64, stack: StackId) -> Event {
    Event { addr, size, stack, ..event(Kind::Alloc, What::Device) }
}

fn give(addr: u64) -> Event {
    Event { addr, ..event(Kind::FreeRequested, What::Device) }
}

fn made(kind: Kind, what: What, addr: u64) -> Event {
    Event { addr, ..event(kind, what) }
}

/// The device says so much is in use, of that by others.
fn says(size: u64, others: u64) -> Event {
    let said = MeasuredEvent { used: size, total: 80 * GIB, by: Some((size - others, others)) };
    Event { thread: 1, ..said.event() }
}

/// Stacks in NCCL, in a user's library and in a second one, and what the
/// accounts say of these events.
fn written(events: impl IntoIterator<Item = Event>) -> Value {
    let mut regions = Made::of_words(5000);
    for (i, path) in (1_u64..).zip(["/a/libnccl.so.2", "/home/me/engine.so", "/home/me/two.so"]) {
        regions.library(path, i << 16..(i << 16) + 4096, 0, None);
        let stack = regions.stack(&[RawFrame::Native { pc: (i << 16) + 16, epoch: 0 }]);
        assert_eq!(stack, STACKS[i as usize - 1]);
    }
    let mut namer =
        Namer::new(&regions.depot[..], &regions.codes[..], &regions.modules[..], Splice::PyTorch);
    let owners = &mut Names::of(&mut namer);
    let mut state = State::default();
    let mut accounts = Accounts::new(&state, false, owners);
    state.watch();
    for (e, n) in events.into_iter().zip(1..) {
        let e = Event { time_ns: n * 1_000_000, ..e };
        state.apply(&e, &|_| "", &mut |_, _| ());
        accounts.note(&e, &state.take_moves(), owners);
    }
    let mut about = Memtrace::default();
    accounts.fill(&mut about, &|_| "cudaMalloc", owners);
    serde_json::to_value(about).expect("JSON")
}

const NCCLS: StackId = 2;
const ENGINES: StackId = 3;
const SECOND: StackId = 4;
/// The three stacks.
const STACKS: [StackId; 3] = [NCCLS, ENGINES, SECOND];

fn lines(about: &Value) -> BTreeMap<String, i64> {
    let table = &about["reconcile"][0];
    let all: BTreeMap<String, i64> = table["lines"]
        .as_array()
        .expect("lines")
        .iter()
        .map(|l| {
            (l["name"].as_str().expect("a name").to_owned(), l["bytes"].as_i64().expect("bytes"))
        })
        .collect();
    assert_eq!(all.values().sum::<i64>(), table["used"].as_i64().expect("used"), "it adds up");
    all
}

fn expect(pairs: &[(&str, u64)]) -> BTreeMap<String, i64> {
    pairs.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes as i64)).collect()
}

#[test]
fn each_owner_has_its_own_and_the_context_the_rest() {
    let about = written([
        made(Kind::Create, What::Context, 7),
        take(0x1000_0000, 48 * MIB, NCCLS),
        take(0x2000_0000, 24 * MIB, ENGINES),
        says(592 * MIB, 0),
    ]);
    assert_eq!(
        lines(&about),
        expect(&[
            ("NCCL", 48 * MIB),
            ("engine.so", 24 * MIB),
            ("contexts", 520 * MIB),
            ("unexplained", 0)
        ])
    );
}

#[test]
fn the_memory_of_graph_executables_is_what_came_with_them() {
    // T51: nothing names it; the device says 8 GiB more.
    let about = written([
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        made(Kind::Create, What::Executable, 8),
        says(500 * MIB + 8 * GIB, 0),
    ]);
    let wanted = [("contexts", 500 * MIB), ("graph executables", 8 * GIB), ("unexplained", 0)];
    assert_eq!(lines(&about), expect(&wanted));
}

#[test]
fn modules_are_charged_when_they_come_and_credited_when_they_go() {
    // T52: loaded in a loop.
    let mut events = vec![made(Kind::Create, What::Context, 7), says(500 * MIB, 0)];
    for n in 1..=10 {
        events.push(made(Kind::Create, What::Module, 100 + n));
        events.push(says((500 + 30 * n) * MIB, 0));
    }
    assert_eq!(lines(&written(events.clone()))["modules"], 300 * MIB as i64);
    events.push(made(Kind::Destroy, What::Module, 101));
    events.push(says((500 + 30 * 9) * MIB, 0));
    let found = lines(&written(events));
    assert_eq!((found["modules"], found["unexplained"]), (270 * MIB as i64, 0));
}

#[test]
fn what_several_sorts_brought_is_theirs_together_and_what_none_did_is_unexplained() {
    let about = written([
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        made(Kind::Create, What::Module, 8),
        made(Kind::Create, What::Executable, 9),
        says(540 * MIB, 0),
        says(1540 * MIB, 0),
    ]);
    let wanted = [
        ("contexts", 500 * MIB),
        ("modules and graph executables", 40 * MIB),
        ("unexplained", 1000 * MIB),
    ];
    assert_eq!(lines(&about), expect(&wanted));
}

#[test]
fn what_one_sort_gives_back_is_credited_where_it_was_charged_with_another() {
    let mut events = vec![
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        made(Kind::Create, What::Module, 8),
        made(Kind::Create, What::Executable, 9),
        says(540 * MIB, 0),
        made(Kind::Destroy, What::Executable, 9),
        says(530 * MIB, 0),
    ];
    let both = |bytes| {
        expect(&[
            ("contexts", 500 * MIB),
            ("modules and graph executables", bytes),
            ("unexplained", 0),
        ])
    };
    assert_eq!(lines(&written(events.clone())), both(30 * MIB));
    events.extend([made(Kind::Destroy, What::Module, 8), says(505 * MIB, 0)]);
    assert_eq!(lines(&written(events)), both(5 * MIB));
}

/// A framework that loads its kernels while it allocates from a pool that
/// keeps what it is given back (JAX).
#[test]
fn what_a_pool_keeps_is_not_a_modules() {
    let pooled =
        |addr, size| Event { addr, size, stack: ENGINES, ..event(Kind::Alloc, What::Pool) };
    let back = |addr| Event { addr, ..event(Kind::FreeRequested, What::Pool) };
    let mut events = vec![
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        pooled(1 << 32, 40 * MIB),
        made(Kind::Create, What::Module, 8),
        says(500 * MIB + 64 * MIB + 2 * MIB, 0),
    ];
    let mine = ("contexts", 500 * MIB);
    let all =
        [mine, ("engine.so", 40 * MIB), ("modules and memory pools", 26 * MIB), ("unexplained", 0)];
    assert_eq!(lines(&written(events.clone())), expect(&all));
    // The pool alone keeps 40 MiB more, or rather all 64 that it has.
    events.extend([back(1 << 32), says(566 * MIB, 0)]);
    let all = [
        mine,
        ("modules and memory pools", 26 * MIB),
        ("kept by memory pools", 40 * MIB),
        ("unexplained", 0),
    ];
    assert_eq!(lines(&written(events.clone())), expect(&all));
    // It is trimmed, of which there is no event: the module's 2 MiB are left.
    events.push(says(502 * MIB, 0));
    let all = [mine, ("modules and memory pools", 2 * MIB), ("unexplained", 0)];
    assert_eq!(lines(&written(events)), expect(&all));
    // What it gave up while a module came is its own, which it kept while nothing came.
    let mut events = vec![
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        pooled(1 << 32, 40 * MIB),
        says(564 * MIB, 0),
        back(1 << 32),
        made(Kind::Create, What::Module, 8),
        says(500 * MIB + 2 * MIB, 0),
    ];
    let all = [mine, ("kept by memory pools", 2 * MIB), ("unexplained", 0)];
    assert_eq!(lines(&written(events.clone())), expect(&all));
    events.extend([made(Kind::Create, What::Module, 9), says(505 * MIB, 0)]);
    assert_eq!(lines(&written(events))["modules"], 3 * MIB as i64);
    // No pool keeps more than was ever in use of it, but for the piece that it grows by.
    let events = [
        made(Kind::Create, What::Context, 7),
        says(500 * MIB, 0),
        pooled(1 << 32, 40 * MIB),
        back(1 << 32),
        says(600 * MIB, 0),
    ];
    let all = [mine, ("kept by memory pools", 64 * MIB), ("unexplained", 36 * MIB)];
    assert_eq!(lines(&written(events)), expect(&all));
}

#[test]
fn other_processes_and_small_pieces_have_lines_of_their_own() {
    let about = written([
        made(Kind::Create, What::Context, 7),
        says(1500 * MIB, 1000 * MIB),
        take(0x1000_0000, 3 * MIB, ENGINES), // two pieces of 2 MiB
        says(1504 * MIB, 1000 * MIB),
        says(2504 * MIB, 2000 * MIB),
    ]);
    let wanted = [
        ("contexts", 500 * MIB),
        ("engine.so", 3 * MIB),
        ("rounding to the driver's pieces of 2 MiB", MIB),
        ("other processes", 2000 * MIB),
        ("unexplained", 0),
    ];
    assert_eq!(lines(&about), expect(&wanted));
}

#[test]
fn the_highest_point_keeps_its_owners() {
    let about = written([
        take(0x1000_0000, 10 * MIB, NCCLS),
        take(0x2000_0000, 20 * MIB, ENGINES),
        give(0x2000_0000),
        take(0x3000_0000, 5 * MIB, SECOND),
    ]);
    let device = &about["owners"]["devices"][0];
    assert_eq!((&device["held"], &device["peak"]["held"]), (&json!(15 * MIB), &json!(30 * MIB)));
    assert_eq!(
        device["peak"]["by"][0],
        json!({"owner": "engine.so", "bytes": 20 * MIB, "count": 1})
    );
    assert_eq!(device["peak"]["time_us"], json!(2000));
    assert_eq!(device["by"][1]["owner"], json!("two.so"));
    assert_eq!(device["taken"], json!({"bytes": 35 * MIB, "count": 3}));
}

#[test]
fn nccls_memory_is_reported_for_each_communicator() {
    let of = |part, event: Event| Event { pool: Pool(part), ..event };
    let about = written([
        of(1, Event { size: 4, stream: 3, ..made(Kind::Create, What::Communicator, 70) }),
        of(1, take(0x1000_0000, 8 * MIB, NCCLS)),
        of(2, take(0x2000_0000, 4 * MIB, NCCLS)),
        of(ONE_OF_SEVERAL, take(0x3000_0000, 2 * MIB, NCCLS)),
        take(0x4000_0000, MIB, NCCLS),
        of(1, take(0x5000_0000, 16 * MIB, ENGINES)), // somebody else's, meanwhile
        of(1, made(Kind::Destroy, What::Communicator, 70)),
    ]);
    let line = |n: u64, ranks: Option<u64>, rank: Option<u64>, bytes, count| json!({"communicator": n, "ranks": ranks, "rank": rank, "bytes": bytes, "count": count});
    assert_eq!(
        about["owners"]["devices"][0]["communicators"],
        json!([
            line(0, None, None, 3 * MIB, 2),
            line(1, Some(4), Some(3), 8 * MIB, 1),
            line(2, None, None, 4 * MIB, 1)
        ])
    );
}

#[test]
fn a_free_waits_for_events_or_for_the_end_of_a_capture() {
    let block = |addr| BlockEvent { addr, asked: MIB, size: MIB, stream: 0 };
    let came = |addr| block(addr).event(Kind::Alloc);
    let freed = |addr| Event { flags: FLAG_PENDING, ..block(addr).event(Kind::FreeRequested) };
    let completed = CompletedEvent { block: 1 << 21 }.event();
    let about = written([
        came(1 << 21),
        came(2 << 21),
        freed(1 << 21),
        freed(2 << 21),
        WaitEvent { block: 2 << 21, handle: 70, stream: 7 }.event(),
        completed,
        ReadyEvent { handle: 70 }.event(),
        completed, // it does not wait any more
    ]);
    let waits = &about["deferred_frees"];
    assert_eq!((&waits["count"], &waits["most_bytes"]), (&json!(2), &json!(2 * MIB)));
    let longest: Vec<_> = waits["longest"].as_array().expect("both").iter().collect();
    let of =
        |w: &Value| (w["requested_us"].clone(), w["completed_us"].clone(), w["streams"].clone());
    let expected = [(3000, 6000, json!([])), (4000, 7000, json!([7]))];
    assert_eq!(
        longest.into_iter().map(of).collect::<Vec<_>>(),
        expected.map(|(from, to, streams)| (json!(from), json!(to), streams))
    );
}

#[test]
fn a_failure_is_reported_with_what_a_library_took_just_before() {
    let refusal = RefusalEvent { asked: GIB, answer: OUT_OF_MEMORY, free: 0 };
    let refused = Event { flags: FLAG_FAILED, stack: ENGINES, ..refusal.event(Kind::Alloc) };
    let about = written([take(0x1000_0000, 2 * GIB, SECOND), refused]);
    assert_eq!(about["out_of_memory"]["owner"], json!("engine.so"));
    let warning = &about["warnings"][0];
    assert_eq!(warning["kind"], json!("taken before out of memory"));
    assert!(warning["text"].as_str().is_some_and(|t| t.contains("two.so took 2147483648 bytes")));
    let own = [take(0x1000_0000, 2 * GIB, ENGINES), refused];
    assert_eq!(written(own)["warnings"], json!([]), "his own");
}

proptest! {
    /// Whatever comes, goes and is said: the lines add up to what the device said.
    #[test]
    fn it_always_adds_up(steps in prop::collection::vec((0_u8..11, 1_u64..64, 0_u64..4), 1..60)) {
        let of = |what, n: u64| Event { what, ..take(n << 32, n * MIB, ENGINES) };
        let events = steps.iter().map(|(what, n, more)| match what {
            8 => of(What::Pool, *n),
            9 => of(What::Managed, *n),
            10 => made(Kind::Destroy, What::MemoryPool, *n),
            0 | 1 => take(n << 32, n * MIB / 2 + more, STACKS[*n as usize % 3]),
            2 => give(n << 32),
            3 => made(Kind::Create, What::Module, *n),
            4 => made(Kind::Destroy, What::Module, *n),
            5 => made(Kind::Create, What::Executable, *n),
            6 => made(Kind::Create, What::Context, *n),
            _ => says(n * 100 * MIB, more * 10 * MIB),
        });
        let about = written(events.chain([says(700 * MIB, 0)]));
        prop_assert!(lines(&about).contains_key("unexplained"));
    }
}

#[test]
fn the_most_page_locked_memory_says_what_was_asked_for_and_by_whom() {
    let host = |kind, what| Event { layer: Layer::Host, ..event(kind, what) };
    let memory =
        |addr, size| Event { addr, size, flags: FLAG_OF_BLOCKS, ..host(Kind::Alloc, What::Pinned) };
    let block = |handle, addr, asked, stack| Event {
        stack,
        ..HostBlockEvent { addr, asked, handle }.event()
    };
    let gone = |handle| HostFreeEvent { handle }.event();
    let others =
        Event { addr: 0x9000_0000, size: MIB, stack: NCCLS, ..host(Kind::Alloc, What::Pinned) };
    let about = written([
        memory(0x1000_0000, 8 * MIB),
        block(1, 0x1000_0000, 5 * MIB, ENGINES),
        gone(1),
        memory(0x2000_0000, 16 * MIB),
        block(2, 0x2000_0000, 9 * MIB, SECOND),
        block(1, 0x1000_0000, 7 * MIB, ENGINES),
        others,
        gone(2),
        gone(1),
        block(1, 0x1000_0000, 8 * MIB, ENGINES),
    ]);
    let host = &about["owners"]["host"];
    let sums = |at: &Value| {
        ["held", "framework", "requested", "rounding"].map(|k| at[k].as_u64().unwrap_or(0) / MIB)
    };
    assert_eq!(sums(&host["peak"]), [25, 24, 16, 8]);
    assert_eq!(sums(host), [25, 24, 8, 0]);
    let rounded: Vec<u64> = host["peak"]["rounded"]
        .as_array()
        .expect("stacks")
        .iter()
        .map(|r| r["bytes"].as_u64().unwrap_or(0) / MIB)
        .collect();
    assert_eq!(rounded, [7, 1]);
    assert_eq!(host["peak"]["time_us"], 7000);
    assert_eq!(
        (&host["by"][0]["owner"], &host["by"][1]["owner"]),
        (&json!("PyTorch"), &json!("NCCL"))
    );
}

#[test]
fn others_that_are_reported_later_are_no_context_any_more() {
    let by_the_call = Event { flags: 0, addr: 0, stream: 0, api: 1, ..says(700 * MIB, 0) };
    let context = made(Kind::Create, What::Context, 7);
    let about = written([context, by_the_call]);
    let both = [("contexts and other processes", 700 * MIB), ("unexplained", 0)];
    assert_eq!(lines(&about), expect(&both));
    let about = written([context, by_the_call, says(700 * MIB, 100 * MIB)]);
    let apart = [("contexts", 600 * MIB), ("other processes", 100 * MIB), ("unexplained", 0)];
    assert_eq!(lines(&about), expect(&apart));
}

#[test]
fn a_reset_gives_back_what_its_context_took() {
    let context = made(Kind::Create, What::Context, 7);
    let reset = event(Kind::Reset, What::Device);
    let about = written([context, says(520 * MIB, 0), reset, says(0, 0)]);
    assert_eq!(lines(&about), expect(&[("unexplained", 0)]));
}

#[test]
fn what_may_lie_elsewhere_explains_no_more_than_there_is_of_it() {
    let of =
        |what, size| Event { addr: 0x5000_0000, size, stack: ENGINES, ..event(Kind::Alloc, what) };
    let reserved = Event { size: 64 * MIB, ..made(Kind::PoolReserved, What::MemoryPool, 9) };
    for (taken, name, most) in [
        (vec![of(What::Pool, 16 * MIB), reserved], "kept by memory pools", 48),
        (vec![of(What::GraphNode, 32 * MIB)], "memory of graphs", 32),
        (vec![of(What::Managed, 8 * MIB)], "managed memory that lies here", 8),
    ] {
        let first = [made(Kind::Create, What::Context, 7), says(520 * MIB, 0)];
        let held = if name.starts_with("kept") { 16 } else { 0 };
        let last = says((520 + held + most + 10) * MIB, 0);
        let mut found = lines(&written(first.into_iter().chain(taken).chain([last])));
        found.remove("engine.so");
        let all = [("contexts", 520 * MIB), (name, most * MIB), ("unexplained", 10 * MIB)];
        assert_eq!(found, expect(&all), "{name}");
    }
}

#[test]
fn managed_memory_is_apart_from_what_a_device_holds() {
    let of = |addr, size, stack| Event { addr, size, stack, ..event(Kind::Alloc, What::Managed) };
    let freed = Event { addr: 0x9000_0000, ..event(Kind::FreeRequested, What::Managed) };
    let taken = [of(0x8000_0000, 3 * MIB, ENGINES), of(0x9000_0000, 5 * MIB, SECOND)];
    let about = written(taken.into_iter().chain([freed, of(0xa000_0000, MIB, ENGINES)]));
    let device = &about["owners"]["devices"][0];
    assert_eq!((&device["held"], &device["peak"]["held"]), (&json!(0), &json!(0)));
    let owner = |name, bytes, count| json!({"owner": name, "bytes": bytes, "count": count});
    let managed = &device["managed"];
    assert_eq!(managed["held"], json!(4 * MIB));
    assert_eq!(managed["by"], json!([owner("engine.so", 4 * MIB, 2)]));
    assert_eq!(managed["peak"]["held"], json!(8 * MIB));
    assert_eq!(managed["peak"]["time_us"], json!(2000));
    let then = json!([owner("two.so", 5 * MIB, 1), owner("engine.so", 3 * MIB, 1)]);
    assert_eq!(managed["peak"]["by"], then);
    let without = written([take(0x1000_0000, MIB, ENGINES)]);
    assert_eq!(without["owners"]["devices"][0]["managed"], Value::Null);
}

#[test]
fn small_requests_share_the_drivers_pieces_and_large_ones_have_their_own() {
    let small = (0..100).map(|i| take(0x1000_0000 + i * MIB, MIB, ENGINES));
    let large = (0..3).map(|i| take(0x4000_0000 + i * 4 * MIB, 3 * MIB, SECOND));
    let before = [made(Kind::Create, What::Context, 7), says(520 * MIB, 0)];
    let after = says((520 + 100 + 3 * 4) * MIB, 0);
    let about = written(before.into_iter().chain(small).chain(large).chain([after]));
    let all = [
        ("contexts", 520 * MIB),
        ("engine.so", 100 * MIB),
        ("two.so", 9 * MIB),
        ("rounding to the driver's pieces of 2 MiB", 3 * MIB),
        ("unexplained", 0),
    ];
    assert_eq!(lines(&about), expect(&all));
}

#[test]
fn the_first_call_on_a_device_is_the_way_in_and_what_is_used_then_its_context() {
    let first = Event { stack: ENGINES, ..event(Kind::Entered, What::Device) };
    let context = Event { stack: NCCLS, ..made(Kind::Create, What::Context, 7) };
    let about = written([first, context, Event { stack: SECOND, ..first }]);
    assert_eq!(about["entered"][0]["owner"], "engine.so");
    // Nobody has seen it come.
    let about = written([says(520 * MIB, 0)]);
    assert_eq!(lines(&about), expect(&[("contexts", 520 * MIB), ("unexplained", 0)]));
}
