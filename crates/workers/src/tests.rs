use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use super::*;

/// All results, or the words of a panic.
fn all<J: Send, R: Send>(
    most: usize,
    jobs: impl IntoIterator<Item = J>,
    work: impl Fn(J) -> R + Sync,
) -> Vec<Result<R, String>> {
    let mut results = Vec::new();
    pool(most, jobs, work, |done| {
        results.push(done.map_err(|p| p.to_string()));
        ControlFlow::Continue(())
    });
    results
}

/// A test that hangs is red, too.
fn within_a_minute<R: Send + 'static>(test: impl FnOnce() -> R + Send + 'static) -> R {
    let (end, ended) = channel();
    let thread = thread::spawn(move || {
        let result = test();
        let _ = end.send(());
        result
    });
    let in_time = ended.recv_timeout(Duration::from_mins(1));
    assert_ne!(in_time, Err(std::sync::mpsc::RecvTimeoutError::Timeout), "it hangs");
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

#[test]
fn results_come_in_the_order_of_the_jobs() {
    let expected: Vec<Result<u64, String>> = (0..200).map(|n| Ok(n * n)).collect();
    for most in [0, 1, 2, 3, 16, 1000] {
        // Early ones take longest.
        let work = |n: u64| {
            thread::sleep(Duration::from_micros((200 - n) % 7 * 300));
            n * n
        };
        assert_eq!(all(most, 0..200, work), expected, "{most} threads");
    }
    assert_eq!(map(0..200, |n| n * n), (0..200).map(|n| n * n).collect::<Vec<_>>());
    assert_eq!(all(4, 0..0, |n: u8| n), []);
}

#[test]
fn jobs_are_done_at_once() {
    // Four that wait for one another end only if four threads are at work.
    let barrier = Barrier::new(4);
    assert_eq!(all(4, 0..4, |n| (barrier.wait(), n).1), [Ok(0), Ok(1), Ok(2), Ok(3)]);
}

#[test]
fn one_processor_needs_no_thread() {
    let here = thread::current().id();
    for most in [0, 1] {
        assert!(all(most, 0..5, |_| thread::current().id()).iter().all(|id| *id == Ok(here)));
    }
    let threads: HashSet<_> =
        all(3, 0..50, |_| thread::current().id()).into_iter().map(Result::unwrap).collect();
    assert!(!threads.contains(&here) && threads.len() <= 3, "{threads:?}");
}

#[test]
fn a_job_that_panics_costs_the_others_nothing() {
    for most in [1, 2, 8] {
        let results = within_a_minute(move || {
            all(most, 0..40, |n| if n % 13 == 5 { panic!("job {n}") } else { n })
        });
        let expected: Vec<_> =
            (0..40).map(|n| if n % 13 == 5 { Err(format!("job {n}")) } else { Ok(n) }).collect();
        assert_eq!(results, expected, "{most} threads");
    }
    let caught = catch_unwind(|| map(0..40, |n| if n == 7 { panic!("seven") } else { n }));
    assert_eq!(caught.map_err(Panicked).expect_err("goes on").to_string(), "seven");
}

#[test]
fn who_has_enough_gets_no_more() {
    for most in [1, 2, 8] {
        let (begun, taken) = within_a_minute(move || {
            let begun = AtomicUsize::new(0);
            let mut taken = Vec::new();
            let work = |n: u32| (begun.fetch_add(1, SeqCst), n).1;
            pool(most, 0.., work, |done| {
                taken.push(done.expect("no panic"));
                if taken.len() == 10 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            (begun.into_inner(), taken)
        });
        assert_eq!(taken, (0..10).collect::<Vec<_>>());
        assert!(begun <= 10 + window(most), "{begun} were begun");
    }
}

#[test]
fn who_takes_may_panic() {
    let caught = within_a_minute(|| {
        catch_unwind(|| pool(4, 0.., |n: u64| n, |n| panic!("took {}", n.expect("no panic"))))
    });
    assert_eq!(caught.map_err(Panicked).expect_err("goes on").to_string(), "took 0");
}

#[test]
fn no_more_jobs_are_made_than_the_window_has_room_for() {
    for most in [1, 2, 5] {
        let (made, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ahead = Mutex::new(0);
        let jobs = (0..300_u32).inspect(|_| {
            let n = made.fetch_add(1, SeqCst) + 1 - taken.load(SeqCst);
            let mut ahead = ahead.lock().expect("no panic");
            *ahead = n.max(*ahead);
        });
        // The first one is slow, so that all the others could be done meanwhile.
        let work = |n| thread::sleep(Duration::from_millis(if n == 0 { 50 } else { 0 }));
        pool(most, jobs, work, |_| {
            taken.fetch_add(1, SeqCst);
            ControlFlow::Continue(())
        });
        assert_eq!(taken.into_inner(), 300);
        let ahead = ahead.into_inner().expect("no panic");
        assert!(ahead <= window(most), "{ahead} jobs of {most} threads at once");
    }
}
