//! Locks that a fork can't leave held for ever.
//!
//! A program may fork while another of its threads holds a lock of ours. In the child there is no
//! such thread, so whoever waited there would wait for ever. The rule: what is shared by threads is
//! behind one of the types of this module; clippy refuses those of `std` (`clippy.toml`). There is
//! no list of locks, and nothing to be done for one when a process forks.
//!
//! A lock's word has the age of the process ([`super::age`]) that used it last beside its state. So
//! a lock of another age is free: its holder is not here. What was being changed at that moment is
//! half changed. It is neither read nor dropped, but forgotten, and begins again as `T::default()`.
//!
//! The alternative is to hold all locks while the process forks (`pthread_atfork`). Then the fork
//! would wait for whoever holds one: a thread that waits for the driver, or for what the forking
//! thread holds, as Python's lock. The age costs two loads of words that nobody writes.
//!
//! A thread that forks while it holds one, as a handler of a signal may,
//! still holds it in the child.

mod state;

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use once_cell::race::OnceBox;

use self::state::Taken;
use super::age::age;
use super::futex::{sleep_on, wake_one};

/// How often a thread looks again before it sleeps.
const LOOKS: u32 = 100;

/// A lock with what it protects. See the module's documentation.
pub struct ForkLock<T> {
    word: AtomicU32,
    /// The thread that has it to change what is behind it; 0 while nobody is known
    /// to. Each thread looks for itself only.
    holder: AtomicUsize,
    value: UnsafeCell<T>,
}

/// Whose turn it is to do something that only one thread may do at a time.
pub type Turn = ForkLock<()>;

// SAFETY: who has the lock alone gets the value for himself; readers need
// `T: Sync`, see `try_read`.
unsafe impl<T: Send> Sync for ForkLock<T> {}

/// A panic while somebody has it ends that somebody's work, at our boundary; the
/// next one goes on with what is there.
impl<T> RefUnwindSafe for ForkLock<T> {}

/// The value, to be changed.
pub struct Guard<'a, T> {
    lock: &'a ForkLock<T>,
    age: u32,
    /// It stays with its thread.
    thread: PhantomData<*const ()>,
}

/// The value, to be read.
pub struct Reading<'a, T> {
    lock: &'a ForkLock<T>,
    age: u32,
    /// It stays with its thread.
    thread: PhantomData<*const ()>,
}

/// This thread: the same in the child that it forks.
fn this_thread() -> usize {
    // SAFETY: no preconditions, also in a handler of a signal.
    (unsafe { libc::pthread_self() }) as usize
}

impl<T> ForkLock<T> {
    /// A free one.
    pub const fn new(value: T) -> ForkLock<T> {
        let (word, holder) = (AtomicU32::new(0), AtomicUsize::new(0));
        ForkLock { word, holder, value: UnsafeCell::new(value) }
    }

    /// Is it held by this thread, since before it forked?
    fn is_held_here(&self) -> bool {
        self.holder.load(Ordering::Relaxed) == this_thread()
    }
}

impl<T: Default> Default for ForkLock<T> {
    fn default() -> Self {
        ForkLock::new(T::default())
    }
}

impl<T: Default> ForkLock<T> {
    /// Waits until nobody of this process has it.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Takes it, if nobody of this process has it.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.take(0)
    }

    /// The same, with more to be noted in its word.
    fn take(&self, more: u32) -> Option<Guard<'_, T>> {
        let age = age();
        let taken = state::take(&self.word, age, more, || self.is_held_here())?;
        self.holder.store(this_thread(), Ordering::Relaxed);
        if let Taken::Abandoned = taken {
            // SAFETY: nobody else has it. The old value may be in any state and is not touched.
            unsafe { self.value.get().write(T::default()) };
        }
        Some(Guard { lock: self, age, thread: PhantomData })
    }

    #[cold]
    fn wait(&self) -> Guard<'_, T> {
        let (mut looks, mut more) = (0, 0);
        loop {
            if let Some(guard) = self.take(more) {
                return guard;
            }
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
            } else if let Some(word) = state::will_wait(&self.word) {
                // Whoever has slept can't know whether others still do.
                more = state::WAITING;
                sleep_on(&self.word, word);
            }
        }
    }
}

impl<T: Default + Sync> ForkLock<T> {
    /// To read, beside others who do; not if somebody is changing it.
    #[inline]
    pub fn try_read(&self) -> Option<Reading<'_, T>> {
        loop {
            let age = age();
            match state::read(&self.word, age) {
                Ok(is_read) => {
                    return is_read.then_some(Reading { lock: self, age, thread: PhantomData });
                }
                // Its word is of this age from here on.
                Err(state::OfAnother) => drop(self.try_lock()?),
            }
        }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.holder.store(0, Ordering::Relaxed);
        if state::give_back(&self.lock.word, self.age) {
            wake_one(&self.lock.word);
        }
    }
}

impl<T> Drop for Reading<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if state::has_read(&self.lock.word, self.age) {
            wake_one(&self.lock.word);
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread alone has it.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread alone has it.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Deref for Reading<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: nobody changes it meanwhile.
        unsafe { &*self.lock.value.get() }
    }
}

/// What is set once and stays. Nobody waits: of several who set it at once, the first counts.
pub struct SetOnce<T>(OnceBox<T>);

impl<T> SetOnce<T> {
    /// Not set yet.
    pub const fn new() -> SetOnce<T> {
        SetOnce(OnceBox::new())
    }

    /// The value, once it is set.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        self.0.get()
    }

    /// Sets it, unless it is set; says what it is.
    pub fn set(&self, value: T) -> &T {
        self.0.get_or_init(|| Box::new(value))
    }
}

impl<T> Default for SetOnce<T> {
    fn default() -> Self {
        SetOnce::new()
    }
}

#[cfg(test)]
mod tests;
