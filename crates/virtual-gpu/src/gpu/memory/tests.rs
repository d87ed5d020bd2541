//! The ledger of memory against simple models.

use super::*;
use core::sync::atomic::Ordering::Relaxed;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// A machine of its own, so that tests do not meet.
fn fresh(total_mib: u64, devices: usize) -> Ledger {
    let account = || {
        let used = Box::leak(Box::new(AtomicU64::new(0)));
        Account { used, total: total_mib * MIB, card: None }
    };
    let accounts: Vec<Account> = (0..devices).map(|_| account()).collect();
    Ledger::new(address::init(16), &accounts, Placement::default())
}

fn used(ledger: &Ledger, device: usize) -> u64 {
    ledger.devices[device].account.used.load(Relaxed) / MIB
}

#[test]
fn large_requests_take_whole_chunks_and_small_ones_share() {
    let mut ledger = fresh(64, 1);
    let base = ledger.allocate(0, MIB + 1).unwrap();
    assert_eq!(used(&ledger, 0), 2);
    let small = ledger.allocate(0, 1).unwrap();
    assert_eq!((small, used(&ledger, 0)), (base + 2 * MIB, 4));
    assert_eq!(ledger.allocate(0, MIB), Ok(small + 512));
    assert_eq!(used(&ledger, 0), 4, "the same chunk");
    assert_eq!(ledger.allocate(0, MIB), Ok(small + 2 * MIB), "no room left in it");
    assert_eq!(used(&ledger, 0), 6);
    ledger.free(small).unwrap();
    assert_eq!(used(&ledger, 0), 6, "the chunk is not empty");
    ledger.free(small + 512).unwrap();
    assert_eq!(used(&ledger, 0), 4, "an empty chunk goes back");
}

#[test]
fn double_and_wrong_frees_are_invalid() {
    let mut ledger = fresh(64, 1);
    let addr = ledger.allocate(0, 3 * MIB).unwrap();
    assert_eq!(ledger.free(addr + 512), Err(Error::INVALID_VALUE));
    assert_eq!(ledger.free_host(addr), Err(Error::INVALID_VALUE));
    assert_eq!(ledger.free(addr), Ok(()));
    assert_eq!(ledger.free(addr), Err(Error::INVALID_VALUE));
    assert_eq!(used(&ledger, 0), 0);
}

#[test]
fn capacity_is_enforced_to_the_chunk() {
    let mut ledger = fresh(10, 1);
    let addr = ledger.allocate(0, 8 * MIB).unwrap();
    assert_eq!(ledger.allocate(0, 2 * MIB + 1), Err(Error::OUT_OF_MEMORY));
    assert!(ledger.allocate(0, 2 * MIB).is_ok());
    assert_eq!(ledger.allocate(0, 1), Err(Error::OUT_OF_MEMORY));
    assert_eq!(ledger.allocate(0, u64::MAX), Err(Error::OUT_OF_MEMORY));
    ledger.free(addr).unwrap();
    assert_eq!(ledger.allocate(0, 8 * MIB), Ok(addr));
}

#[test]
fn pools_grow_in_steps_and_shrink_when_the_host_waits() {
    let mut ledger = fresh(1024, 1);
    let pool = ledger.default_pool(0).unwrap();
    let addr = ledger.allocate_from_pool(pool, 40 * MIB).unwrap();
    assert_eq!(used(&ledger, 0), 64);
    let second = ledger.allocate_from_pool(pool, 1000).unwrap();
    assert_eq!((used(&ledger, 0), ledger.pool(pool).unwrap().used), (64, 40 * MIB + 1024));
    ledger.free(addr).unwrap();
    assert_eq!(used(&ledger, 0), 64, "nobody has waited yet");
    ledger.synchronize_pools();
    assert_eq!(used(&ledger, 0), 32);
    ledger.free(second).unwrap();
    ledger.trim_pool(pool, 0).unwrap();
    assert_eq!(used(&ledger, 0), 0);
    assert_eq!(ledger.pool(pool).unwrap().reserved_high, 64 * MIB);
    assert_eq!(ledger.destroy_pool(pool), Err(Error::INVALID_VALUE), "the default pool");
}

#[test]
fn a_pool_takes_less_than_a_step_when_there_is_no_more() {
    let mut ledger = fresh(40, 1);
    let pool = ledger.default_pool(0).unwrap();
    assert!(ledger.allocate_from_pool(pool, 33 * MIB).is_ok());
    assert_eq!(used(&ledger, 0), 34);
    assert_eq!(ledger.allocate_from_pool(pool, 8 * MIB), Err(Error::OUT_OF_MEMORY));
}

#[test]
fn a_destroyed_pool_lives_until_its_last_allocation() {
    let mut ledger = fresh(128, 1);
    let account = ledger.account(0).unwrap();
    let pool = ledger.create_pool(Pool::on_device(0, account));
    let addr = ledger.allocate_from_pool(pool, MIB).unwrap();
    ledger.set_current_pool(0, pool).unwrap();
    ledger.destroy_pool(pool).unwrap();
    assert!(ledger.pool(pool).is_err());
    assert_eq!(ledger.current_pool(0), ledger.default_pool(0));
    assert!(used(&ledger, 0) > 0);
    ledger.free(addr).unwrap();
    assert_eq!(used(&ledger, 0), 0);
}

#[test]
fn physical_memory_goes_with_its_last_handle_and_mapping() {
    let mut ledger = fresh(64, 1);
    let place = ledger.reserve(64 * MIB, 0, 0, 0).unwrap();
    assert_eq!(used(&ledger, 0), 0, "addresses are free");
    let memory = Physical::new(4 * MIB, Location::Device(0), 0, false);
    let handle = ledger.create(memory).unwrap();
    assert_eq!(used(&ledger, 0), 4);
    ledger.map(place, 4 * MIB, 0, handle).unwrap();
    assert!(ledger.map(place + 2 * MIB, 2 * MIB, 0, handle).is_err(), "taken");
    assert!(ledger.map(place + 62 * MIB, 4 * MIB, 0, handle).is_err(), "beyond the reservation");
    ledger.release(handle).unwrap();
    assert!(ledger.release(handle).is_err());
    assert_eq!(used(&ledger, 0), 4, "still mapped");
    assert_eq!(ledger.retain_mapped(place + MIB), Ok(handle));
    assert!(ledger.check(place, 4 * MIB).is_ok() && ledger.check(place, 4 * MIB + 1).is_err());
    assert!(ledger.unmap(place, 2 * MIB).is_err(), "half a mapping");
    assert!(ledger.unreserve(place, 64 * MIB).is_err(), "something is mapped");
    ledger.unmap(place, 4 * MIB).unwrap();
    assert_eq!(used(&ledger, 0), 4, "a handle is left");
    ledger.release(handle).unwrap();
    assert_eq!(used(&ledger, 0), 0);
    ledger.unreserve(place, 64 * MIB).unwrap();
    assert_eq!(ledger.reserve(64 * MIB, 0, 0, 0), Ok(place));
    let too_much = Physical::new(66 * MIB, Location::Device(0), 0, false);
    assert_eq!(ledger.create(too_much), Err(Error::OUT_OF_MEMORY));
    let odd = Physical::new(MIB, Location::Device(0), 0, false);
    assert_eq!(ledger.create(odd), Err(Error::INVALID_VALUE));
}

#[test]
fn host_memory_is_real_and_registered_ranges_do_not_overlap() {
    let mut ledger = fresh(64, 1);
    let place = ledger.allocate_host(0, 10_000, 0).unwrap();
    let bytes = core::ptr::with_exposed_provenance_mut::<u8>(place as usize);
    // SAFETY: just allocated, 10,000 bytes.
    unsafe {
        bytes.write_bytes(7, 10_000);
        assert_eq!(bytes.add(9_999).read(), 7);
    }
    assert_eq!(used(&ledger, 0), 0);
    let own = vec![0u8; 8192];
    let at = own.as_ptr().addr() as u64;
    ledger.register(0, at, 8192, 0).unwrap();
    assert_eq!(ledger.register(0, at + 4096, 8192, 0), Err(Error::HOST_MEMORY_ALREADY_REGISTERED));
    assert_eq!(ledger.register(0, at - 100, 200, 0), Err(Error::HOST_MEMORY_ALREADY_REGISTERED));
    assert_eq!(ledger.unregister(at + 1), Err(Error::HOST_MEMORY_NOT_REGISTERED));
    ledger.unregister(at).unwrap();
    ledger.free_host(place).unwrap();
    assert_eq!(ledger.allocate_host(0, 1, 0), Ok(place));
    ledger.free_host(place).unwrap();
}

#[test]
fn an_imported_allocation_costs_nothing() {
    let mut ledger = fresh(64, 1);
    let addr = ledger.allocate(0, 5 * MIB).unwrap();
    let own = ledger.export(addr + 100).unwrap();
    assert_eq!(MemoryTicket::from_bytes(&own.to_bytes()), Some(own));
    assert_eq!(own.size, 5 * MIB);
    assert_eq!(ledger.import(0, own), Err(Error::INVALID_CONTEXT), "the same process");
    let other = MemoryTicket { pid: own.pid + 1, ..own };
    let here = ledger.import(0, other).unwrap();
    assert_eq!(ledger.import(0, other), Ok(here));
    assert_eq!((used(&ledger, 0), ledger.find(here).unwrap().size), (6, 5 * MIB));
    assert_eq!(ledger.free(here), Err(Error::INVALID_VALUE));
    ledger.close_import(here).unwrap();
    assert!(ledger.find(here).is_some(), "opened twice");
    ledger.close_import(here).unwrap();
    assert!(ledger.find(here).is_none());
    assert_eq!(MemoryTicket::from_bytes(&[0; 64]), None);
}

#[test]
fn a_reset_takes_all_of_one_device() {
    let mut ledger = fresh(256, 2);
    let kept = ledger.allocate(1, 4 * MIB).unwrap();
    let pool = ledger.default_pool(0).unwrap();
    for size in [100, 3 * MIB] {
        ledger.allocate(0, size).unwrap();
        ledger.allocate_from_pool(pool, size).unwrap();
    }
    ledger.reset(0, 0);
    assert_eq!((used(&ledger, 0), used(&ledger, 1)), (0, 4));
    assert!(ledger.find(kept).is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![1..4096u64, 1..MIB, MIB..3 * MIB, 1..12 * MIB];
    let step =
        prop_oneof![3 => size.prop_map(Step::Allocate), 2 => any::<usize>().prop_map(Step::Free)];
    prop::collection::vec(step, 1..150)
}

proptest! {
    /// The heap against a list of allocations: the cost is that of the chunks that hold something,
    /// nothing overlaps, out-of-memory comes exactly when the chunks run out.
    #[test]
    fn heap_equals_a_list(steps in steps()) {
        let mut ledger = fresh(48, 1);
        let mut live: Vec<(u64, u64)> = Vec::new();
        let chunks = |live: &[(u64, u64)]| {
            let held: std::collections::BTreeSet<u64> = live
                .iter()
                .flat_map(|(at, size)| at / CHUNK..(at + size).div_ceil(CHUNK))
                .collect();
            held.len() as u64 * 2
        };
        for step in steps {
            match step {
                Step::Allocate(size) => match ledger.allocate(0, size) {
                    Ok(at) => {
                        let align = if size > SMALL { CHUNK } else { GRAIN };
                        prop_assert!(at.is_multiple_of(align));
                        prop_assert!(live.iter().all(|(a, s)| at + size <= *a || a + s <= at));
                        live.push((at, size));
                    }
                    Err(error) => {
                        prop_assert_eq!(error, Error::OUT_OF_MEMORY);
                        let more = size.div_ceil(CHUNK) * 2;
                        prop_assert!(chunks(&live) + more > 48);
                    }
                },
                Step::Free(which) if !live.is_empty() => {
                    let (at, _) = live.swap_remove(which % live.len());
                    prop_assert_eq!(ledger.free(at), Ok(()));
                    prop_assert_eq!(ledger.free(at), Err(Error::INVALID_VALUE));
                }
                Step::Free(_) => {}
            }
            prop_assert_eq!(used(&ledger, 0), chunks(&live));
            for (at, size) in &live {
                prop_assert_eq!(ledger.find(at + size - 1).map(|found| found.start), Some(*at));
            }
        }
    }

    /// The same steps give the same addresses.
    #[test]
    fn placement_is_a_function_of_the_steps(steps in steps()) {
        let run = || {
            let mut ledger = fresh(48, 1);
            let mut live = Vec::new();
            for step in &steps {
                match step {
                    Step::Allocate(size) => live.extend(ledger.allocate(0, *size)),
                    Step::Free(which) if !live.is_empty() => {
                        let at = live.remove(which % live.len());
                        ledger.free(at).unwrap();
                    }
                    Step::Free(_) => {}
                }
            }
            live
        };
        prop_assert_eq!(run(), run());
    }
}
