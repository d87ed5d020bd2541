//! The command `memtrace`; everything it does is in the library beside this file.

mod inherited;

use std::process::ExitCode;

fn main() -> ExitCode {
    memtrace_cli::main(inherited::inherit)
}
