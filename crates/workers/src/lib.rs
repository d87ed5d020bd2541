//! Many jobs, done on as many threads as there are processors, and their
//! results in the order of the jobs.
//!
//! There is one pool for all long work of the command: black boxes to recover, settings to try,
//! libraries to read. What a user sees does not depend on how many threads there were. Results are
//! taken in the order of the jobs, in the thread that asked. With one processor, or where no thread
//! can be started, the jobs are done one after the other there.
//!
//! * Memory is bounded. Jobs are made as they are needed; at most [`window`] of them are
//!   under way or done and not yet taken. A slow job holds up the taking of those behind it,
//!   and so, after a while, their beginning.
//! * A job that panics gives [`Panicked`] in its place. The others go on.
//! * Whoever takes results may have enough: jobs that are under way are waited
//!   for, those that wait are not begun.
//!
//! Jobs come to the threads by a channel that many may read from (`crossbeam-channel`),
//! which the standard library doesn't have. Whoever is free takes the next job. The asking
//! thread takes back what nobody has begun.

#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::num::NonZero;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use crossbeam_channel::{Receiver, bounded};

/// A job ended in a panic.
pub struct Panicked(Box<dyn Any + Send>);

impl Panicked {
    /// Goes on with the panic, in this thread.
    pub fn resume(self) -> ! {
        resume_unwind(self.0)
    }
}

impl fmt::Display for Panicked {
    /// What the panic said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.downcast_ref::<&str>().copied();
        let text = text.or_else(|| self.0.downcast_ref::<String>().map(String::as_str));
        f.write_str(text.unwrap_or("a panic without words"))
    }
}

impl fmt::Debug for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Panicked({self})")
    }
}

/// What became of a job.
pub type Done<R> = Result<R, Panicked>;

/// Does `work` for each job, and hands what became of it to `take`, in the order of the jobs.
pub fn each<J: Send, R: Send>(
    jobs: impl IntoIterator<Item = J>,
    work: impl Fn(J) -> R + Sync,
    take: impl FnMut(Done<R>) -> ControlFlow<()>,
) {
    pool(processors(), jobs, work, take);
}

/// The results of all jobs, in their order. If one panics, so does this,
/// when those before it are done.
pub fn map<J: Send, R: Send>(
    jobs: impl IntoIterator<Item = J>,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    let mut results = Vec::new();
    let mut panicked = None;
    each(jobs, work, |done| match done {
        Ok(result) => {
            results.push(result);
            ControlFlow::Continue(())
        }
        Err(panic) => {
            panicked = Some(panic);
            ControlFlow::Break(())
        }
    });
    if let Some(panic) = panicked {
        panic.resume();
    }
    results
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// How many jobs of so many threads may be given out without their results being taken. It is
/// enough that nobody waits for work while the others are about equally fast.
pub fn window(threads: usize) -> usize {
    2 * threads
}

fn run<J, R>(work: &impl Fn(J) -> R, job: J) -> Done<R> {
    // What a job changed and left half done is seen by nobody: `work` is shared as
    // one that changes nothing of its own.
    catch_unwind(AssertUnwindSafe(|| work(job))).map_err(Panicked)
}

/// Takes back the jobs that nobody has begun, however the asking ends.
struct TakeBack<T>(Receiver<T>);

impl<T> Drop for TakeBack<T> {
    fn drop(&mut self) {
        self.0.try_iter().for_each(drop);
    }
}

fn pool<J: Send, R: Send>(
    most: usize,
    jobs: impl IntoIterator<Item = J>,
    work: impl Fn(J) -> R + Sync,
    mut take: impl FnMut(Done<R>) -> ControlFlow<()>,
) {
    let mut jobs = jobs.into_iter().fuse();
    // A single thread would only be waited for.
    let mut most = if most < 2 { 0 } else { most };
    let window = window(most).max(1);
    thread::scope(|scope| {
        // Neither is ever full: no more than `window` jobs are in both together.
        let (give, queue) = bounded::<(usize, J)>(window);
        let (report, done) = bounded::<(usize, Done<R>)>(window);
        let waiting = TakeBack(queue);
        let begin = || -> io::Result<()> {
            let (queue, report, work) = (waiting.0.clone(), report.clone(), &work);
            let body = move || {
                for (number, job) in queue {
                    // The asking thread is gone if it panicked.
                    let _ = report.send((number, run(work, job)));
                }
            };
            thread::Builder::new().name("memtrace-worker".to_owned()).spawn_scoped(scope, body)?;
            Ok(())
        };
        let (mut threads, mut taken) = (0, 0);
        // What became of the jobs that were given out, from the first that isn't taken.
        let mut results: VecDeque<Option<Done<R>>> = VecDeque::new();
        loop {
            while results.len() < window
                && let Some(job) = jobs.next()
            {
                if threads < most {
                    match begin() {
                        Ok(()) => threads += 1,
                        Err(_) => most = threads, // as many as there are do it, too
                    }
                }
                if threads == 0 {
                    if take(run(&work, job)).is_break() {
                        return;
                    }
                    continue;
                }
                let number = taken + results.len();
                results.push_back(None);
                if give.send((number, job)).is_err() {
                    unreachable!("this thread has the other end, too");
                }
            }
            if results.is_empty() {
                return;
            }
            while results.front().is_some_and(Option::is_none) {
                let Ok((number, result)) = done.recv() else {
                    unreachable!("this thread has the other end, too");
                };
                results[number - taken] = Some(result);
            }
            while let Some(Some(_)) = results.front() {
                if let Some(Some(result)) = results.pop_front() {
                    taken += 1;
                    if take(result).is_break() {
                        return;
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
