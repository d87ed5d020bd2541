//! A list that only grows: what each thread has of its own, for ever.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_os::sync::Word;

/// See the module's documentation.
pub struct List<T, W = AtomicUsize> {
    /// The address of the last one.
    head: W,
    of: PhantomData<fn() -> T>,
}

/// One of a list; all zeros is one, if that is a `T`.
#[repr(C)]
pub struct Node<T, W = AtomicUsize> {
    next: W,
    /// Whose it is: a number that no other living thread has.
    owner: W,
    what: T,
}

impl<T> List<T> {
    /// An empty one.
    pub const fn new() -> List<T> {
        List { head: AtomicUsize::new(0), of: PhantomData }
    }
}

impl<T: 'static, W: Word<Value = usize> + 'static> List<T, W> {
    /// All of them, the last one first.
    pub fn all(&self) -> impl Iterator<Item = &'static Node<T, W>> {
        let follow = |at: &W| {
            let at = ptr::with_exposed_provenance::<Node<T, W>>(at.load(Ordering::Acquire));
            // SAFETY: null, or the address of a node that lives for ever.
            unsafe { at.as_ref() }
        };
        std::iter::successors(follow(&self.head), move |node| follow(&node.next))
    }

    /// The one that has this owner.
    pub fn of(&self, owner: usize) -> Option<&'static Node<T, W>> {
        self.all().find(|node| node.owner.load(Ordering::Relaxed) == owner)
    }

    /// One more, which is in no list yet.
    pub fn push(&self, node: &'static Node<T, W>, owner: usize) {
        node.owner.store(owner, Ordering::Relaxed);
        let (at, order) = (ptr::from_ref(node).expose_provenance(), Ordering::AcqRel);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            node.next.store(head, Ordering::Relaxed);
            match self.head.compare_exchange(head, at, order, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }
}

impl<T, W> Deref for Node<T, W> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.what
    }
}

#[cfg(all(test, loom))]
mod tests {
    /// Seen red: with `Relaxed` where a block is shown or found.
    mod model {
        use super::super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicUsize as Modelled;
        use loom::thread;

        #[test]
        fn what_two_threads_add_is_there_and_whole() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let list = Arc::new(List { head: Modelled::new(0), of: PhantomData });
                let adds = |list: &List<Modelled, Modelled>, owner: usize| {
                    let [next, of, what] = [0; 3].map(Modelled::new);
                    let node = Box::leak(Box::new(Node { next, owner: of, what }));
                    node.store(owner, Ordering::Relaxed);
                    list.push(node, owner);
                    assert!(list.of(owner).is_some_and(|found| ptr::eq(found, node)));
                };
                let other = list.clone();
                let other = thread::spawn(move || adds(&other, 5));
                adds(&list, 6);
                for node in list.all() {
                    let owner = node.owner.load(Ordering::Relaxed);
                    assert_eq!(node.load(Ordering::Relaxed), owner);
                }
                other.join().unwrap();
                assert_eq!(list.all().count(), 2);
            });
        }
    }
}
