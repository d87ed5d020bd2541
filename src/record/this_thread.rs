//! Where a thread keeps what it knows of itself, found in three instructions.
//!
//! A thread-local variable of a shared library costs a call of `__tls_get_addr` each time: ten
//! instructions and a jump through two tables. An allocation and its free ask three times. *TLS
//! descriptors* are the ABI's other way ("Thread-Local Storage Descriptors for IA32 and
//! AMD64/EM64T"). The loader puts a function into a descriptor that fits where the variable came to
//! lie. For a library that was there at the start, as with `LD_PRELOAD`, that function adds a
//! number. For one that was opened later it looks the variable up.
//!
//! The compiler has no option for them here, so one word is declared by hand: the address of the
//! thread's [`super::guard::Local`], or null as long as nobody has asked.
//!
//! It must never be written by anything but [`set`], nor point to what dies before the thread.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod word {
    std::arch::global_asm!(
        ".pushsection .tbss.memtrace_this_thread,\"awT\",@nobits",
        ".globl memtrace_this_thread",
        ".hidden memtrace_this_thread",
        ".type memtrace_this_thread, @object",
        ".size memtrace_this_thread, 8",
        ".balign 8",
        "memtrace_this_thread:",
        ".zero 8",
        ".popsection",
    );

    /// The address of the word.
    #[inline]
    pub fn at() -> *mut *const () {
        let at: usize;
        // SAFETY: the sequence of the ABI. The function behind the descriptor keeps all
        // registers but rax; that of a library opened late may, in old versions of the C
        // library, change those that any call may change.
        unsafe {
            std::arch::asm!(
                "lea rax, [rip + memtrace_this_thread@tlsdesc]",
                "call qword ptr [rax + memtrace_this_thread@tlscall]",
                "add rax, qword ptr fs:[0]",
                out("rax") at,
                clobber_abi("sysv64"),
            );
        }
        at as *mut *const ()
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod word {
    use std::cell::Cell;

    thread_local! {
        static WORD: Cell<*const ()> = const { Cell::new(std::ptr::null()) };
    }

    /// The address of the word.
    pub fn at() -> *mut *const () {
        WORD.with(Cell::as_ptr)
    }
}

/// What this thread has set; null if nothing.
#[inline]
pub fn get<T>() -> *const T {
    // SAFETY: a word of this thread's own.
    unsafe { word::at().read().cast() }
}

/// Sets it.
pub fn set<T>(to: *const T) {
    // SAFETY: as in `get`.
    unsafe { word::at().write(to.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_a_word_of_its_own() {
        let threads: Vec<_> = (1..=8_usize)
            .map(|n| {
                std::thread::spawn(move || {
                    let before = get::<u8>();
                    set(n as *const u8);
                    std::thread::yield_now();
                    (before as usize, get::<u8>() as usize)
                })
            })
            .collect();
        let seen: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(seen, (1..=8).map(|n| (0, n)).collect::<Vec<_>>());
    }
}
