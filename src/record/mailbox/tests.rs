//! What a hook leaves in the mailbox is found, whatever the background
//! thread is doing at that moment.
//!
//! In a model nobody naps, so a thread that has missed something sleeps for ever. Each was
//! seen red: where a wake-up comes before the word that it is about, where there is none, or
//! where it isn't a release. So was the last one, where the request for the last snapshot
//! replaces the answer that it is done.

mod model {
    use loom::sync::Arc;
    use loom::thread;

    use crate::record::mailbox::Mailbox;

    fn check(model: impl Fn(Arc<Mailbox>) + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || model(Arc::new(Mailbox::new(Some(10)))));
    }

    /// What the background thread does until it has found what it waits for.
    fn until(mailbox: &Mailbox, found: impl Fn(&Mailbox) -> bool) {
        loop {
            let calls = mailbox.calls();
            if found(mailbox) {
                return;
            }
            mailbox.wait(calls);
        }
    }

    #[test]
    fn a_failure_is_heard() {
        check(|mailbox| {
            let hook = mailbox.clone();
            let hook = thread::spawn(move || hook.out_of_memory(7));
            until(&mailbox, |m| m.take_oom() == Some(8));
            hook.join().unwrap();
            assert_eq!(mailbox.take_oom(), None, "once");
        });
    }

    #[test]
    fn wishes_are_heard() {
        check(|mailbox| {
            let hook = mailbox.clone();
            let hook = thread::spawn(move || {
                hook.measure();
                hook.allocated(10, 8);
            });
            until(&mailbox, Mailbox::take_measure);
            until(&mailbox, |m| m.take_peak() == Some(9));
            hook.join().unwrap();
        });
    }

    #[test]
    fn who_waits_for_the_last_snapshot_gets_it() {
        check(|mailbox| {
            mailbox.begun();
            let background = mailbox.clone();
            let background = thread::spawn(move || {
                until(&background, Mailbox::is_last_snapshot_requested);
                background.last_snapshot_done();
            });
            mailbox.request_last_snapshot(FOR_EVER);
            background.join().unwrap();
        });
    }

    /// The thread ends by itself while somebody begins to wait for it.
    #[test]
    fn nobody_waits_for_a_thread_that_has_gone() {
        check(|mailbox| {
            mailbox.begun();
            let background = mailbox.clone();
            let background = thread::spawn(move || background.gone());
            mailbox.request_last_snapshot(FOR_EVER);
            background.join().unwrap();
        });
    }

    const FOR_EVER: u64 = u64::MAX / 2;
}
