//! What a program inherits of whoever starts it: which of standard input, output and error are
//! closed, whether `SIGPIPE` is ignored, which signals are blocked.
//!
//! Rust's runtime changes that before `main`, and once more when it becomes another program. Closed
//! descriptors lead to `/dev/null`, `SIGPIPE` is ignored and then not, no signal is blocked. So it
//! is looked at before the runtime begins, and put back as the last thing before `exec`.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

/// Standard input, output and error.
const STANDARD: [i32; 3] = [0, 1, 2];

struct Inherited {
    closed: [bool; 3],
    ignores_pipe: bool,
    blocked: libc::sigset_t,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: these only ask; the records are ours.
    let inherited = unsafe {
        let (mut pipe, mut blocked) = (std::mem::zeroed::<libc::sigaction>(), std::mem::zeroed());
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut pipe);
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut blocked);
        let closed = STANDARD.map(|fd| libc::fcntl(fd, libc::F_GETFD) < 0);
        Inherited { closed, ignores_pipe: pipe.sa_sigaction == libc::SIG_IGN, blocked }
    };
    let _ = INHERITED.set(inherited);
}

/// Has the program inherit the same.
pub(crate) fn inherit(command: &mut Command) {
    let Some(inherited) = INHERITED.get() else { return };
    let put_back = move || {
        // SAFETY: plain system calls; what is closed was opened by the runtime.
        unsafe {
            for fd in
                STANDARD.into_iter().zip(inherited.closed).filter_map(|(fd, c)| c.then_some(fd))
            {
                libc::close(fd);
            }
            if inherited.ignores_pipe {
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            }
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const inherited.blocked,
                std::ptr::null_mut(),
            );
        }
        Ok(())
    };
    // SAFETY: it makes system calls only, and there is no other thread.
    unsafe { command.pre_exec(put_back) };
}
