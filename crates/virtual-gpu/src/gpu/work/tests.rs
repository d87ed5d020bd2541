//! Streams, capture and graphs, as programs use them.

use super::*;
use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A machine's work of its own, so that tests do not meet.
fn fresh() -> (Work, u64, u64) {
    let mut work = Work::new(machine().count());
    let a = work.create_stream(0, NON_BLOCKING, 0).unwrap();
    let b = work.create_stream(0, NON_BLOCKING, -3).unwrap();
    (work, a, b)
}

fn kernel(work: &mut Work, stream: u64) -> Option<Action> {
    work.admit(stream, Action::kernel()).unwrap()
}

#[test]
fn streams_have_their_own_ids_and_clamped_priorities() {
    let (mut work, a, b) = fresh();
    let high = work.create_stream(0, 0, -100).unwrap();
    assert_eq!(work.stream(high).unwrap().priority, PRIORITIES.1);
    let mut ids = [a, b, high, 0, PER_THREAD].map(|stream| work.stream(stream).unwrap().id);
    ids.sort_unstable();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!(work.create_stream(0, 8, 0), Err(Error::INVALID_VALUE));
    work.destroy_stream(a).unwrap();
    assert_eq!(work.destroy_stream(a), Err(Error::INVALID_HANDLE));
    assert_eq!(work.destroy_stream(0), Err(Error::INVALID_HANDLE));
}

#[test]
fn captured_work_becomes_nodes_and_waits() {
    let (mut work, a, _) = fresh();
    assert!(kernel(&mut work, a).is_some(), "done at once");
    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    assert_eq!(work.begin_capture(a, Mode::Relaxed, None), Err(Error::ILLEGAL_STATE));
    assert!(kernel(&mut work, a).is_none() && kernel(&mut work, a).is_none());
    let graph = work.end_capture(a).unwrap();
    let nodes = work.graph_nodes(graph).unwrap();
    assert_eq!(work.graph_edges(graph).unwrap(), [(nodes[0], nodes[1])]);
    assert_eq!(work.graph_roots(graph).unwrap(), [nodes[0]]);
    assert!(kernel(&mut work, a).is_some(), "no longer capturing");
    assert_eq!(work.end_capture(a), Err(Error::ILLEGAL_STATE));
    let exec = work.instantiate(graph, 0).unwrap();
    assert_eq!(work.actions(exec).unwrap().len(), 2);
}

#[test]
fn events_draw_streams_into_a_capture_and_out_again() {
    let (mut work, a, b) = fresh();
    let fork = work.create_event(0, 0).unwrap();
    let join = work.create_event(0, 0).unwrap();
    work.begin_capture(a, Mode::Global, None).unwrap();
    kernel(&mut work, a);
    work.record(fork, a).unwrap();
    assert_eq!(work.settled_event(fork).err(), Some(Error::CAPTURED_EVENT));
    work.wait(b, fork).unwrap();
    assert_eq!(work.capture_status(b), Ok(Status::Active));
    kernel(&mut work, b);
    work.record(join, b).unwrap();
    work.wait(a, join).unwrap();
    let info = work.capture_info(a).unwrap().unwrap();
    assert_eq!(info.count, 2, "what a and what b did last");
    kernel(&mut work, a);
    let graph = work.end_capture(a).unwrap();
    let nodes = work.graph_nodes(graph).unwrap();
    let mut last = work.nodes_before(nodes[2]).unwrap();
    last.sort_unstable();
    assert_eq!(last, [nodes[0], nodes[1]]);
    assert_eq!(work.capture_status(b), Ok(Status::None));
    assert!(work.settled_event(join).is_ok());
}

#[test]
fn work_that_was_not_joined_spoils_the_capture() {
    let (mut work, a, b) = fresh();
    let fork = work.create_event(0, 0).unwrap();
    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    work.record(fork, a).unwrap();
    work.wait(b, fork).unwrap();
    kernel(&mut work, b);
    assert_eq!(work.end_capture(b), Err(Error::CAPTURE_UNMATCHED));
    assert_eq!(work.end_capture(a), Err(Error::CAPTURE_INVALIDATED));
    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    work.record(fork, a).unwrap();
    work.wait(b, fork).unwrap();
    kernel(&mut work, b);
    assert_eq!(work.end_capture(a), Err(Error::CAPTURE_UNJOINED));
    assert!(kernel(&mut work, b).is_some(), "both streams are free again");
}

#[test]
fn dependencies_across_the_edge_of_a_capture_are_refused() {
    let (mut work, a, b) = fresh();
    let before = work.create_event(0, 0).unwrap();
    work.record(before, b).unwrap();
    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    assert_eq!(work.wait(a, before), Err(Error::CAPTURE_ISOLATION));
    assert_eq!(work.capture_status(a), Ok(Status::Invalidated));
    assert_eq!(work.admit(a, Action::kernel()).err(), Some(Error::CAPTURE_INVALIDATED));
    assert_eq!(work.end_capture(a), Err(Error::CAPTURE_INVALIDATED));

    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    work.begin_capture(b, Mode::Relaxed, None).unwrap();
    work.record(before, b).unwrap();
    assert_eq!(work.wait(a, before), Err(Error::CAPTURE_MERGE));
    assert_eq!(work.end_capture(a), Err(Error::CAPTURE_INVALIDATED));
    assert_eq!(work.end_capture(b), Err(Error::CAPTURE_INVALIDATED));
}

#[test]
fn waiting_and_the_legacy_stream_are_refused_while_capturing() {
    let (mut work, a, _) = fresh();
    let blocking = work.create_stream(0, 0, 0).unwrap();
    assert_eq!(work.begin_capture(0, Mode::Relaxed, None), Err(Error::CAPTURE_UNSUPPORTED));
    work.begin_capture(a, Mode::Relaxed, None).unwrap();
    assert!(kernel(&mut work, 0).is_some(), "it does not wait for a non-blocking stream");
    assert_eq!(work.refuse_while_capturing(a), Err(Error::CAPTURE_UNSUPPORTED));
    assert_eq!(work.end_capture(a), Err(Error::CAPTURE_INVALIDATED));
    work.begin_capture(blocking, Mode::Relaxed, None).unwrap();
    assert_eq!(work.admit(0, Action::kernel()).err(), Some(Error::CAPTURE_IMPLICIT));
    assert_eq!(work.end_capture(blocking), Err(Error::CAPTURE_INVALIDATED));
}

#[test]
fn copies_of_graphs_have_nodes_of_their_own() {
    let (mut work, ..) = fresh();
    let graph = work.create_graph();
    let first = work.add_node(graph, Action::kernel(), vec![]).unwrap();
    let inner = work.create_graph();
    work.add_node(inner, Action::Empty, vec![]).unwrap();
    let second = work.add_node(graph, Action::Child(inner), vec![first]).unwrap();
    assert_eq!(work.add_node(graph, Action::Empty, vec![12345]), Err(Error::INVALID_VALUE));

    let copy = work.clone_graph(graph).unwrap();
    let twin = work.node_in_copy(second, copy).unwrap();
    assert_ne!(twin, second);
    assert_eq!(work.nodes_before(twin).unwrap(), [work.node_in_copy(first, copy).unwrap()]);

    let exec = work.instantiate(graph, 0).unwrap();
    assert_eq!(work.actions(exec).unwrap().len(), 3, "the child's work is part of it");
    work.destroy_graph(graph).unwrap().call();
    assert_eq!(work.graph_nodes(inner), Err(Error::INVALID_VALUE), "owned by its node");
    assert_eq!(work.action(first).err(), Some(Error::INVALID_VALUE));
    assert_eq!(work.actions(exec).unwrap().len(), 3, "an executable graph stands on its own");
    assert_eq!(work.graph_nodes(copy).unwrap().len(), 2);
}

#[test]
fn parameters_change_in_the_graph_or_in_the_executable_copy() {
    let (mut work, ..) = fresh();
    let graph = work.create_graph();
    let node = work.add_node(graph, Action::copy(1, 2, 3), vec![]).unwrap();
    let exec = work.instantiate(graph, 0).unwrap();
    work.set_exec_action(exec, node, Action::copy(4, 5, 6)).unwrap();
    let is =
        |action: &Action, dst| matches!(action, Action::Copy { dst: at, .. } if at.addr == dst);
    assert!(is(&work.actions(exec).unwrap()[0], 4) && is(work.action(node).unwrap(), 1));
    assert_eq!(work.set_action(node, Action::Empty), Err(Error::INVALID_VALUE), "another kind");
    work.set_action(node, Action::copy(7, 8, 9)).unwrap();
    let (same, destructors) = work.update_exec(exec, graph).unwrap();
    destructors.call();
    assert!(same && is(&work.actions(exec).unwrap()[0], 7));
    work.add_node(graph, Action::Empty, vec![]).unwrap();
    let (same, destructors) = work.update_exec(exec, graph).unwrap();
    destructors.call();
    assert!(!same, "another shape");
}

#[test]
fn user_objects_are_destroyed_with_the_last_that_holds_them() {
    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the test passes a counter that outlives it.
        unsafe { &*data.cast::<AtomicUsize>() }.fetch_add(1, Relaxed);
    }
    static DESTROYED: AtomicUsize = AtomicUsize::new(0);
    let data = (&raw const DESTROYED).expose_provenance();
    let (mut work, ..) = fresh();
    let graph = work.create_graph();
    let object = work.create_object(count, data, 1).unwrap();
    work.graph_retains(graph, object, 1, true).unwrap();
    let exec = work.instantiate(graph, 0).unwrap();
    work.destroy_graph(graph).unwrap().call();
    assert_eq!(DESTROYED.load(Relaxed), 0, "the executable graph holds it");
    work.destroy_exec(exec).unwrap().call();
    assert_eq!(DESTROYED.load(Relaxed), 1);
    assert!(work.release_object(object, 1).is_err());
    assert_eq!(work.create_object(count, data, 0), Err(Error::INVALID_VALUE));
}

#[test]
fn events_are_asked_for_time_only_if_they_keep_it() {
    let (mut work, a, _) = fresh();
    let start = work.create_event(0, 0).unwrap();
    let end = work.create_event(0, 0).unwrap();
    let blind = work.create_event(0, 2).unwrap();
    assert_eq!(work.elapsed(start, end), Err(Error::INVALID_HANDLE), "not recorded");
    for event in [start, end, blind] {
        work.record(event, a).unwrap();
    }
    assert!(work.elapsed(start, end).unwrap() > 0.0);
    assert_eq!(work.elapsed(start, blind), Err(Error::INVALID_HANDLE));
    assert_eq!(work.create_event(0, 4), Err(Error::INVALID_VALUE), "interprocess keeps no time");
    assert_eq!(work.exportable_event(start), Err(Error::INVALID_HANDLE));
}

/// All that goes through the process's one machine, in one test, as
/// captures are seen by every thread.
#[test]
fn graphs_do_their_work_when_they_are_launched() {
    context::touch(0).unwrap();
    let stream = work().create_stream(0, NON_BLOCKING, 0).unwrap();
    let addr = memory::alloc(0, 4096).unwrap();
    let mut host = [0u8; 8];
    let at = host.as_mut_ptr().expose_provenance() as u64;

    work().begin_capture(stream, Mode::Global, None).unwrap();
    assert_eq!(guard(), Err(Error::CAPTURE_UNSUPPORTED), "an unsafe call");
    assert_eq!(end_capture(stream), Err(Error::CAPTURE_INVALIDATED));

    work().begin_capture(stream, Mode::Global, None).unwrap();
    thread::with(|thread| thread.capture_mode.set(2));
    assert_eq!(guard(), Ok(()), "the thread takes it on itself");
    thread::with(|thread| thread.capture_mode.set(0));
    submit(stream, Action::fill(addr, 7, 8)).unwrap();
    submit(stream, Action::copy(at, addr, 8)).unwrap();
    let memory_addr = work().capture_memory(stream, 0, 1 << 20).unwrap();
    submit(stream, Action::Free(memory_addr)).unwrap();
    let graph = end_capture(stream).unwrap();
    assert_eq!(host, [0; 8], "nothing was done yet");

    let exec = work().instantiate(graph, 0).unwrap();
    let launches = crate::gpu::launches();
    launch_graph(exec, stream).unwrap();
    assert_eq!(host, [7; 8]);
    assert!(crate::gpu::launches() >= launches);
    let pool = *memory::ledger().graph_pool(0).unwrap();
    assert_eq!((pool.used, pool.used_high), (0, 1 << 20));
    assert!(pool.reserved >= 1 << 20, "kept for the next launch");
    memory::ledger().trim_graph_pool(0).unwrap();
    assert_eq!(memory::ledger().graph_pool(0).unwrap().reserved, 0);

    assert!(memory::ledger().find(memory_addr).is_some());
    work().destroy_graph(graph).unwrap().call();
    work().destroy_exec(exec).unwrap().call();
    assert!(memory::ledger().find(memory_addr).is_none(), "gone with the last copy");
    memory::free(addr).unwrap();

    // What a graph allocates and does not free outlives it, until the program frees it.
    let graph = work().create_graph();
    let (_, live) = work().add_memory(graph, 0, 5 << 20, vec![]).unwrap();
    let (_, never) = work().add_memory(graph, 0, 5 << 20, vec![]).unwrap();
    let exec = work().instantiate(graph, 0).unwrap();
    memory::ledger().materialise(live).unwrap();
    work().destroy_graph(graph).unwrap().call();
    work().destroy_exec(exec).unwrap().call();
    assert_eq!(memory::ledger().graph_pool(0).unwrap().used, 5 << 20);
    for addr in [live, never] {
        assert_eq!(memory::free(addr), Ok(()));
        assert_eq!(memory::free(addr), Err(Error::INVALID_VALUE));
    }
    assert_eq!(memory::ledger().graph_pool(0).unwrap().used, 0);
}
