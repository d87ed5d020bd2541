//! The book of memory against simple models.

use super::*;
use core::sync::atomic::Ordering::Relaxed;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// A machine of its own, so that tests do not meet.
fn fresh(total_mib: u64, devices: usize) -> Book {
    let account = || {
        let used = Box::leak(Box::new(AtomicU64::new(0)));
        Account { used, total: total_mib * MIB, card: None }
    };
    let accounts: Vec<Account> = (0..devices).map(|_| account()).collect();
    Book::new(address::init(16), &accounts, Placement::default())
}

fn used(book: &Book, device: usize) -> u64 {
    book.rooms[device].account.used.load(Relaxed) / MIB
}

#[test]
fn large_requests_take_whole_chunks_and_small_ones_share() {
    let mut book = fresh(64, 1);
    let base = book.allocate(0, MIB + 1).unwrap();
    assert_eq!(used(&book, 0), 2);
    let small = book.allocate(0, 1).unwrap();
    assert_eq!((small, used(&book, 0)), (base + 2 * MIB, 4));
    assert_eq!(book.allocate(0, MIB), Ok(small + 512));
    assert_eq!(used(&book, 0), 4, "the same chunk");
    assert_eq!(book.allocate(0, MIB), Ok(small + 2 * MIB), "no room left in it");
    assert_eq!(used(&book, 0), 6);
    book.free(small).unwrap();
    assert_eq!(used(&book, 0), 6, "the chunk is not empty");
    book.free(small + 512).unwrap();
    assert_eq!(used(&book, 0), 4, "an empty chunk goes back");
}

#[test]
fn double_and_wrong_frees_are_invalid() {
    let mut book = fresh(64, 1);
    let addr = book.allocate(0, 3 * MIB).unwrap();
    assert_eq!(book.free(addr + 512), Err(Error::INVALID_VALUE));
    assert_eq!(book.free_host(addr), Err(Error::INVALID_VALUE));
    assert_eq!(book.free(addr), Ok(()));
    assert_eq!(book.free(addr), Err(Error::INVALID_VALUE));
    assert_eq!(used(&book, 0), 0);
}

#[test]
fn capacity_is_enforced_to_the_chunk() {
    let mut book = fresh(10, 1);
    let addr = book.allocate(0, 8 * MIB).unwrap();
    assert_eq!(book.allocate(0, 2 * MIB + 1), Err(Error::OUT_OF_MEMORY));
    assert!(book.allocate(0, 2 * MIB).is_ok());
    assert_eq!(book.allocate(0, 1), Err(Error::OUT_OF_MEMORY));
    assert_eq!(book.allocate(0, u64::MAX), Err(Error::OUT_OF_MEMORY));
    book.free(addr).unwrap();
    assert_eq!(book.allocate(0, 8 * MIB), Ok(addr));
}

#[test]
fn pools_grow_in_steps_and_shrink_when_the_host_waits() {
    let mut book = fresh(1024, 1);
    let pool = book.default_pool(0).unwrap();
    let addr = book.allocate_from_pool(pool, 40 * MIB).unwrap();
    assert_eq!(used(&book, 0), 64);
    let second = book.allocate_from_pool(pool, 1000).unwrap();
    assert_eq!((used(&book, 0), book.pool(pool).unwrap().used), (64, 40 * MIB + 1024));
    book.free(addr).unwrap();
    assert_eq!(used(&book, 0), 64, "nobody has waited yet");
    book.synchronize_pools();
    assert_eq!(used(&book, 0), 32);
    book.free(second).unwrap();
    book.trim_pool(pool, 0).unwrap();
    assert_eq!(used(&book, 0), 0);
    assert_eq!(book.pool(pool).unwrap().reserved_high, 64 * MIB);
    assert_eq!(book.destroy_pool(pool), Err(Error::INVALID_VALUE), "the default pool");
}

#[test]
fn a_pool_takes_less_than_a_step_when_there_is_no_more() {
    let mut book = fresh(40, 1);
    let pool = book.default_pool(0).unwrap();
    assert!(book.allocate_from_pool(pool, 33 * MIB).is_ok());
    assert_eq!(used(&book, 0), 34);
    assert_eq!(book.allocate_from_pool(pool, 8 * MIB), Err(Error::OUT_OF_MEMORY));
}

#[test]
fn a_destroyed_pool_lives_until_its_last_allocation() {
    let mut book = fresh(128, 1);
    let account = book.account(0).unwrap();
    let pool = book.create_pool(Pool::on_device(0, account));
    let addr = book.allocate_from_pool(pool, MIB).unwrap();
    book.set_current_pool(0, pool).unwrap();
    book.destroy_pool(pool).unwrap();
    assert!(book.pool(pool).is_err());
    assert_eq!(book.current_pool(0), book.default_pool(0));
    assert!(used(&book, 0) > 0);
    book.free(addr).unwrap();
    assert_eq!(used(&book, 0), 0);
}

#[test]
fn physical_memory_goes_with_its_last_handle_and_mapping() {
    let mut book = fresh(64, 1);
    let place = book.reserve(64 * MIB, 0, 0, 0).unwrap();
    assert_eq!(used(&book, 0), 0, "addresses are free");
    let memory = Physical::new(4 * MIB, Location::Device(0), 0, false);
    let handle = book.create(memory).unwrap();
    assert_eq!(used(&book, 0), 4);
    book.map(place, 4 * MIB, 0, handle).unwrap();
    assert!(book.map(place + 2 * MIB, 2 * MIB, 0, handle).is_err(), "taken");
    assert!(book.map(place + 62 * MIB, 4 * MIB, 0, handle).is_err(), "beyond the reservation");
    book.release(handle).unwrap();
    assert!(book.release(handle).is_err());
    assert_eq!(used(&book, 0), 4, "still mapped");
    assert_eq!(book.retain_mapped(place + MIB), Ok(handle));
    assert!(book.check(place, 4 * MIB).is_ok() && book.check(place, 4 * MIB + 1).is_err());
    assert!(book.unmap(place, 2 * MIB).is_err(), "half a mapping");
    assert!(book.unreserve(place, 64 * MIB).is_err(), "something is mapped");
    book.unmap(place, 4 * MIB).unwrap();
    assert_eq!(used(&book, 0), 4, "a handle is left");
    book.release(handle).unwrap();
    assert_eq!(used(&book, 0), 0);
    book.unreserve(place, 64 * MIB).unwrap();
    assert_eq!(book.reserve(64 * MIB, 0, 0, 0), Ok(place));
    let too_much = Physical::new(66 * MIB, Location::Device(0), 0, false);
    assert_eq!(book.create(too_much), Err(Error::OUT_OF_MEMORY));
    let odd = Physical::new(MIB, Location::Device(0), 0, false);
    assert_eq!(book.create(odd), Err(Error::INVALID_VALUE));
}

#[test]
fn host_memory_is_real_and_registered_ranges_do_not_overlap() {
    let mut book = fresh(64, 1);
    let place = book.allocate_host(0, 10_000, 0).unwrap();
    let bytes = core::ptr::with_exposed_provenance_mut::<u8>(place as usize);
    // SAFETY: just allocated, 10,000 bytes.
    unsafe {
        bytes.write_bytes(7, 10_000);
        assert_eq!(bytes.add(9_999).read(), 7);
    }
    assert_eq!(used(&book, 0), 0);
    let own = vec![0u8; 8192];
    let at = own.as_ptr().addr() as u64;
    book.register(0, at, 8192, 0).unwrap();
    assert_eq!(book.register(0, at + 4096, 8192, 0), Err(Error::HOST_MEMORY_ALREADY_REGISTERED));
    assert_eq!(book.register(0, at - 100, 200, 0), Err(Error::HOST_MEMORY_ALREADY_REGISTERED));
    assert_eq!(book.unregister(at + 1), Err(Error::HOST_MEMORY_NOT_REGISTERED));
    book.unregister(at).unwrap();
    book.free_host(place).unwrap();
    assert_eq!(book.allocate_host(0, 1, 0), Ok(place));
    book.free_host(place).unwrap();
}

#[test]
fn an_imported_allocation_costs_nothing() {
    let mut book = fresh(64, 1);
    let addr = book.allocate(0, 5 * MIB).unwrap();
    let own = book.export(addr + 100).unwrap();
    assert_eq!(MemoryTicket::from_bytes(&own.to_bytes()), Some(own));
    assert_eq!(own.size, 5 * MIB);
    assert_eq!(book.import(0, own), Err(Error::INVALID_CONTEXT), "the same process");
    let other = MemoryTicket { pid: own.pid + 1, ..own };
    let here = book.import(0, other).unwrap();
    assert_eq!(book.import(0, other), Ok(here));
    assert_eq!((used(&book, 0), book.find(here).unwrap().size), (6, 5 * MIB));
    assert_eq!(book.free(here), Err(Error::INVALID_VALUE));
    book.close_import(here).unwrap();
    assert!(book.find(here).is_some(), "opened twice");
    book.close_import(here).unwrap();
    assert!(book.find(here).is_none());
    assert_eq!(MemoryTicket::from_bytes(&[0; 64]), None);
}

#[test]
fn a_reset_takes_all_of_one_device() {
    let mut book = fresh(256, 2);
    let kept = book.allocate(1, 4 * MIB).unwrap();
    let pool = book.default_pool(0).unwrap();
    for size in [100, 3 * MIB] {
        book.allocate(0, size).unwrap();
        book.allocate_from_pool(pool, size).unwrap();
    }
    book.reset(0, 0);
    assert_eq!((used(&book, 0), used(&book, 1)), (0, 4));
    assert!(book.find(kept).is_some());
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
        let mut book = fresh(48, 1);
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
                Step::Allocate(size) => match book.allocate(0, size) {
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
                    prop_assert_eq!(book.free(at), Ok(()));
                    prop_assert_eq!(book.free(at), Err(Error::INVALID_VALUE));
                }
                Step::Free(_) => {}
            }
            prop_assert_eq!(used(&book, 0), chunks(&live));
            for (at, size) in &live {
                prop_assert_eq!(book.find(at + size - 1).map(|found| found.start), Some(*at));
            }
        }
    }

    /// The same steps give the same addresses.
    #[test]
    fn placement_is_a_function_of_the_steps(steps in steps()) {
        let run = || {
            let mut book = fresh(48, 1);
            let mut live = Vec::new();
            for step in &steps {
                match step {
                    Step::Allocate(size) => live.extend(book.allocate(0, *size)),
                    Step::Free(which) if !live.is_empty() => {
                        let at = live.remove(which % live.len());
                        book.free(at).unwrap();
                    }
                    Step::Free(_) => {}
                }
            }
            live
        };
        prop_assert_eq!(run(), run());
    }
}
