//! `memtrace report` and the text about a failure, on snapshots made by hand.

use memtrace_analysis::{oom, report};
use memtrace_format::key::Memtrace;
use memtrace_format::snapshot::{
    Action, Block, BlockState, Frame, Segment, Snapshot, StackIx, TraceEntry,
};
use serde_json::json;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Two stacks: the user's line 7, and cuBLAS's workspace.
fn with_stacks() -> Snapshot {
    let frame = |name: &str, filename: &str, line| Frame {
        name: name.to_owned(),
        filename: filename.to_owned(),
        line,
    };
    Snapshot {
        frames: vec![
            frame("train", "/home/me/train.py", 7),
            frame("at::cuda::allocateCUDABlasWorkspace(unsigned long)", "libtorch_cuda.so", 1),
        ],
        stacks: vec![vec![0], vec![1, 0]],
        device_traces: vec![Vec::new()],
        ..Snapshot::default()
    }
}

const USERS: Option<StackIx> = Some(0);
const WORKSPACE: Option<StackIx> = Some(1);

fn segment(address: u64, stream: u64, blocks: &[(u64, BlockState, Option<StackIx>)]) -> Segment {
    let mut at = address;
    let blocks: Vec<Block> = blocks
        .iter()
        .map(|(size, state, frames)| {
            at += size;
            let address = at - size;
            Block { address, size: *size, requested_size: *size, state: *state, frames: *frames }
        })
        .collect();
    let sum = |is: &dyn Fn(&&Block) -> bool| blocks.iter().filter(is).map(|b| b.size).sum::<u64>();
    Segment {
        device: 0,
        address,
        total_size: at - address,
        allocated_size: sum(&|b| b.state == BlockState::ActiveAllocated),
        active_size: sum(&|b| b.state != BlockState::Inactive),
        requested_size: 0,
        stream,
        small: false,
        pool_id: (0, 0),
        is_expandable: false,
        frames: None,
        blocks,
    }
}

use BlockState::{ActiveAllocated as Live, Inactive as Free};

fn entry(action: Action, addr: u64, size: u64, stream: u64) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        stream,
        time_us: Some(1),
        compile_context: None,
        user_metadata: None,
        pool_id: None,
        frames: WORKSPACE,
    }
}

#[test]
fn a_file_of_pytorchs_own_has_one_owner() {
    let mut snapshot = with_stacks();
    snapshot.segments =
        vec![segment(0x1000_0000, 0, &[(8 * MIB, Live, USERS), (12 * MIB, Free, None)])];
    let report = report::report(&snapshot);
    let [device] = &report.devices[..] else { panic!("one device") };
    assert_eq!(device.held, 20 * MIB);
    let owners: Vec<_> = device.owners.iter().map(|o| (o.owner.as_str(), o.bytes)).collect();
    assert_eq!(owners, [("PyTorch", 20 * MIB)]);
    assert_eq!(device.sites[0].site, "/home/me/train.py:7 train");
    assert!(device.reconcile.is_none() && report.host.is_empty());
    let [asked, pieces] = &report.warnings[..] else { panic!("{:?}", report.warnings) };
    assert!(asked.contains("was never asked how full it is"), "{asked}");
    assert!(pieces.contains("12582912 bytes are free between live blocks"), "{pieces}");
}

#[test]
fn the_memtrace_key_is_reported() {
    let mut snapshot = with_stacks();
    let by = json!([{"owner": "NCCL", "bytes": 48 * MIB, "count": 2}]);
    let communicators = json!([
        {"communicator": 0, "ranks": null, "rank": null, "bytes": MIB, "count": 1},
        {"communicator": 2, "ranks": 8, "rank": 3, "bytes": 40 * MIB, "count": 1},
        {"communicator": 3, "ranks": null, "rank": null, "bytes": 7 * MIB, "count": 1},
    ]);
    snapshot.memtrace = Memtrace::read(json!({
        "owners": {
            "devices": [{"device": 1, "held": 48 * MIB, "by": by, "peak": {"held": 99 * MIB, "by": null}, "communicators": communicators}],
            "host": {"by": [{"owner": "engine.so", "bytes": 5, "count": 1}], "communicators": []},
        },
        "reconcile": [{
            "device": 1, "time_us": 5, "source": "NVML", "used": GIB, "total": 80 * GIB, "unexplained": 100 * MIB,
            "lines": [{"name": "NCCL", "bytes": 48 * MIB, "known": "booked"}],
        }],
        "warnings": [{"kind": "stray context", "device": 0, "text": "stray context on device 0", "frames": [{"name": "load", "filename": "/home/me/load.py", "line": 3}]}],
    }));
    let report = report::report(&snapshot);
    let device = report.devices.iter().find(|d| d.device == 1).expect("device 1");
    assert_eq!((device.peak_held, device.held), (99 * MIB, 48 * MIB));
    assert!(device.owners_at_peak.is_empty(), "by whom is not known");
    let names: Vec<_> = device.communicators.iter().map(|o| o.owner.as_str()).collect();
    assert_eq!(
        names,
        ["NCCL, communicator unknown", "NCCL, communicator 2: rank 3 of 8", "NCCL, communicator 3"]
    );
    assert_eq!(report.host[0].owner, "engine.so");
    assert!(
        report.warnings.iter().any(|w| w == "stray context on device 0, /home/me/load.py:3 load")
    );
    assert!(report.warnings.iter().any(|w| w.contains("104857600 bytes are unexplained")));
}

#[test]
fn pinned_memory_is_what_was_asked_for_what_rounding_adds_and_what_is_idle() {
    let frames = |line| json!([{"name": "load", "filename": "/home/me/load.py", "line": line}]);
    let report_of = |rounding, rounded| {
        let mut snapshot = with_stacks();
        let sums = json!({"held": 33 * MIB, "framework": 32 * MIB, "requested": 20 * MIB, "rounding": rounding, "rounded": rounded});
        snapshot.memtrace =
            Memtrace::read(json!({"owners": {"devices": [], "host": {"by": [], "peak": sums}}}));
        report::report(&snapshot)
    };
    let one = |bytes, line| json!({"bytes": bytes, "count": 1, "frames": frames(line)});
    let report = report_of(11 * MIB, json!([one(MIB, 4), one(7 * MIB, 3), one(3 * MIB, 4)]));
    let pinned = report.pinned.expect("known");
    assert_eq!((pinned.peak.held, pinned.peak.idle, pinned.end.held), (32 * MIB, MIB, 0));
    let sites: Vec<_> =
        pinned.peak.sites.iter().map(|s| (s.site.as_str(), s.bytes, s.count)).collect();
    assert_eq!(
        sites,
        [("/home/me/load.py:3 load", 7 * MIB, 1), ("/home/me/load.py:4 load", 4 * MIB, 2)]
    );
    let [warning] = &report.warnings[..] else { panic!("{:?}", report.warnings) };
    assert!(warning.contains("held 32505856 bytes for 20971520") && warning.contains("load.py:3"));
    assert!(report_of(8 * MIB, json!([one(8 * MIB, 3)])).warnings.is_empty(), "a quarter is usual");
}

#[test]
fn workspaces_are_listed_by_stream_live_or_not() {
    let mut snapshot = with_stacks();
    snapshot.segments = vec![
        segment(0x1000_0000, 0, &[(8 * MIB, Live, USERS), (12 * MIB, Free, None)]),
        segment(0x2000_0000, 7, &[(2 * MIB, Live, WORKSPACE)]), // from before the history
    ];
    snapshot.device_traces[0] = vec![
        entry(Action::Alloc, 0x1080_0000, 4 * MIB, 0),
        entry(Action::Alloc, 0x10c0_0000, 3 * MIB, 0),
        entry(Action::FreeCompleted, 0x1080_0000, 4 * MIB, 0),
        entry(Action::FreeCompleted, 0x10c0_0000, 3 * MIB, 0),
        entry(Action::Alloc, 0x3000_0000, MIB, 7),
        entry(Action::FreeCompleted, 0x3000_0000, MIB, 7),
    ];
    let report = report::report(&snapshot);
    let found: Vec<_> =
        report.devices[0].workspaces.iter().map(|w| (w.stream, w.bytes, w.peak)).collect();
    assert_eq!(found, [(0, 0, 7 * MIB), (7, 2 * MIB, 3 * MIB)]);
}

#[test]
fn the_text_about_a_failure_says_what_to_do() {
    let mut snapshot = with_stacks();
    assert_eq!(oom::text(&snapshot, snapshot.tables()), None, "nothing failed");
    snapshot.segments = vec![segment(
        0x1000_0000,
        0,
        &[(GIB, Free, None), (64 * MIB, Live, USERS), (GIB, Free, None)],
    )];
    snapshot.memtrace = Memtrace::read(json!({
        "owners": {"devices": [{"device": 0, "by": [{"owner": "PyTorch", "bytes": 2112 * MIB, "count": 1}]}]},
        "reconcile": [{"device": 0, "total": 6 * GIB}],
        "out_of_memory": {"device": 0, "asked": 2 * GIB, "free": 5, "call": null, "owner": "PyTorch", "frames": [{"name": "step", "filename": "/home/me/train.py", "line": 9}]},
        "warnings": [{"kind": "taken before out of memory", "text": "NCCL took 4 bytes", "frames": []}, {"kind": "stray context", "text": "elsewhere", "frames": []}],
    }));
    let text = oom::text(&snapshot, snapshot.tables()).expect("it failed");
    for line in [
        "OUT OF MEMORY on device 0: 2.00 GiB asked of PyTorch's allocator",
        "  at /home/me/train.py:9 step",
        "  the device had 5 B free",
        "  largest free run 1.00 GiB of 2.00 GiB free inside segments",
        "      2.06 GiB  PyTorch",
        "      64.0 MiB  1 x  /home/me/train.py:7 train",
        "    the free memory is enough but in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "    64.0 MiB in 1 blocks that pin a run of 2.00 GiB: /home/me/train.py:7 train",
    ] {
        assert!(text.lines().any(|l| l == line), "{line:?} is not in\n{text}");
    }
    assert!(text.contains("NCCL took 4 bytes") && !text.contains("elsewhere"));
    assert!(text.lines().count() <= oom::LINES);
    let about = snapshot.memtrace.as_mut().and_then(|about| about.out_of_memory.as_mut());
    about.expect("it failed").asked = Some(7 * GIB);
    let text = oom::text(&snapshot, snapshot.tables()).expect("it failed");
    assert!(text.ends_with("    nothing: it is more than the whole device has\n"), "{text}");
}

#[test]
fn labels_that_only_a_number_tells_apart_are_rolled_up() {
    let row = |label: &str, bytes| report::Labelled { label: label.to_owned(), bytes, count: 1 };
    let rows = [
        row("forward/layers.0/attention", 30),
        row("forward/layers.1/attention", 20),
        row("forward/layers.11/attention", 10),
        row("forward/layers.0/mlp", 40),
        row("step 7", 5),
        row("conv2d", 2),
        row("conv3d", 1),
        row("", 3),
    ];
    let rolled = report::rolled_up(&rows);
    let shown: Vec<_> = rolled.iter().map(|l| (&*l.label, l.bytes, l.count)).collect();
    assert_eq!(
        shown,
        [
            ("forward/layers.*/attention", 60, 3),
            ("forward/layers.0/mlp", 40, 1),
            ("step 7", 5, 1),
            ("", 3, 1),
            ("conv2d", 2, 1),
            ("conv3d", 1, 1),
        ]
    );
}

#[test]
fn the_text_about_a_failure_says_what_it_leaves_out() {
    let mut snapshot = with_stacks();
    let owner = |n: u64| json!({"owner": format!("library {n}"), "bytes": MIB, "count": 1});
    let owners: Vec<_> = (0..8).map(owner).collect();
    snapshot.memtrace = Memtrace::read(json!({
        "owners": {"devices": [{"device": 0, "by": owners}]},
        "out_of_memory": {"device": 0, "asked": GIB, "free": 5, "call": null, "frames": []},
    }));
    let text = oom::text(&snapshot, snapshot.tables()).expect("it failed");
    assert!(text.contains("       3.0 MiB  in 3 more owners\n"), "{}", &*text);
}
