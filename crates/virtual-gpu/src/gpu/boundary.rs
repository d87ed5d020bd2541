//! The boundary with C: how arguments come in and answers go out.
//!
//! A caller's pointers are wrapped where they are declared, as [`Out`] and [`In`]. Every prototype
//! says of its pointers that they are null, or good for one value, or for as many as a count beside
//! them says. So the functions above are safe code. The promise is written down, and checked for
//! null, in one place. No pointer can be made here: they come from a C caller, who is responsible
//! for them. Where a record has another layout in another version, or its content decides its type,
//! [`Out::at`] and [`Out::cast`] follow the layout tables.
//!
//! No panic crosses the boundary: it would be undefined behaviour in a C program. It
//! becomes an unknown error, and is reported.

use super::error::{Error, Result};
use super::{context, life, log, thread};
use core::ffi::{CStr, c_char};
use core::fmt::Display;
use core::panic::Location;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A pointer to which the callee writes.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

/// A pointer from which the callee reads.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

/// A C string that the callee reads.
pub type Text = In<c_char>;

impl<T> Out<T> {
    /// Null: for an answer that is not wanted.
    pub const fn null() -> Self {
        Self(core::ptr::null_mut())
    }

    /// A pointer that came as a number, in a parameter whose meaning another one decides.
    ///
    /// # Safety
    /// It is what the caller passed for a pointer to a `T`.
    pub(crate) unsafe fn from_address(addr: u64) -> Self {
        Self(core::ptr::with_exposed_provenance_mut(addr as usize))
    }

    /// A test's own variable, which must outlive the call.
    #[cfg(test)]
    pub(crate) fn to(place: &mut T) -> Self {
        Self(core::ptr::from_mut(place))
    }

    /// The caller passed no pointer.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Null is an invalid argument: for functions that must not begin without a place for the
    /// answer.
    pub fn check(self) -> Result {
        if self.0.is_null() { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    /// Writes the value; null is an invalid argument.
    pub fn set(self, value: T) -> Result {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, so good for one value, as the prototype says; it need not be aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the value if the caller wants it.
    pub fn give(self, value: T) {
        // Null means that nobody asks.
        let _ = self.set(value);
    }

    /// Writes as many values as the caller has room for, which it says in `room`.
    pub fn fill(self, values: &[T], room: usize)
    where
        T: Copy,
    {
        if self.0.is_null() {
            return;
        }
        for (i, value) in values.iter().take(room).enumerate() {
            // SAFETY: the caller has room for `room` values, and `i` is below that.
            unsafe { self.0.add(i).write_unaligned(*value) };
        }
    }

    /// What is there now.
    pub fn get(self) -> Result<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    /// The address itself.
    pub fn addr(self) -> u64 {
        self.0.addr() as u64
    }

    /// The same place, holding something else, for arguments whose type another one decides.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The place `bytes` behind this one, for structs that are known by their layout only.
    pub fn at<U>(self, bytes: usize) -> Out<U> {
        Out(self.0.cast::<u8>().wrapping_add(bytes).cast())
    }
}

impl Out<u8> {
    /// Clears `len` bytes.
    pub fn clear(self, len: usize) -> Result {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, so good for the whole struct, whose size the layout table gives.
        unsafe { self.0.write_bytes(0, len) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a string and its end, cut to the caller's room.
    pub fn text(self, text: &str, room: usize) -> Result {
        if self.0.is_null() || room == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let mut bytes: Vec<c_char> =
            text.bytes().take(room - 1).map(|byte| byte as c_char).collect();
        bytes.push(0);
        self.fill(&bytes, room);
        Ok(())
    }
}

impl<T: Copy> In<T> {
    /// No pointer.
    #[cfg(test)]
    pub(crate) fn null() -> Self {
        Self(core::ptr::null())
    }

    /// A test's own variable, which must outlive the call.
    #[cfg(test)]
    pub(crate) fn from(place: &T) -> Self {
        Self(core::ptr::from_ref(place))
    }

    /// The caller passed no pointer.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Reads the value; null is an invalid argument.
    pub fn get(self) -> Result<T> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, so good for one value, as the prototype says; it need not be aligned.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Reads as many values as the caller says there are. None if there is no pointer.
    pub fn list(self, len: usize) -> Vec<T> {
        if self.0.is_null() {
            return Vec::new();
        }
        // SAFETY: the caller says that there are `len` values, and `i` is below that.
        (0..len).map(|i| unsafe { self.0.add(i).read_unaligned() }).collect()
    }

    /// The address itself.
    pub fn addr(self) -> u64 {
        self.0.addr() as u64
    }

    /// The same place, holding something else.
    pub fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// The place `bytes` behind this one, for structs that are known by their layout only.
    pub fn at<U>(self, bytes: usize) -> In<U> {
        In(self.0.cast::<u8>().wrapping_add(bytes).cast())
    }
}

impl Text {
    /// A test's own string.
    #[cfg(test)]
    pub(crate) fn of(text: &'static CStr) -> Self {
        Self(text.as_ptr())
    }

    /// The string.
    pub fn string(self) -> Result<String> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: not null, so a C string, as the prototype says.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Runs the body of a function and turns a panic into an unknown error.
fn guarded(work: impl FnOnce() -> Result) -> Result {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        log::warn_once("an internal error was answered as cudaErrorUnknown; please report it");
        Err(Error::UNKNOWN)
    })
}

/// The API that a program calls. Both ask the same machine, and most of their functions have one
/// body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Api {
    /// `cu…`: makes no context by itself. `cuInit` and a current context must be there.
    Driver,
    /// `cuda…`: wakes CUDA and makes contexts as they are needed, and keeps the last error.
    Runtime,
}

impl Api {
    /// The device that a call goes to. Without a context the driver refuses; the runtime makes one.
    pub fn device(self) -> Result<usize> {
        match self {
            Api::Driver => context::current().map(|current| current.device),
            Api::Runtime => context::bind(),
        }
    }

    /// What the driver checks before anything else. The runtime makes its context later, if the
    /// call gets that far.
    pub fn needs_context(self) -> Result {
        match self {
            Api::Driver => context::current().map(|_| ()),
            Api::Runtime => Ok(()),
        }
    }

    /// As [`Api::device`], for work on a stream. A stream knows its context; only the default
    /// streams (0, `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`) are the current context's.
    pub fn context_of(self, stream: u64) -> Result {
        const LAST_DEFAULT: u64 = 2;
        let knows = self == Api::Driver && stream > LAST_DEFAULT;
        if knows { Ok(()) } else { self.device().map(|_| ()) }
    }

    fn wake(self) -> Result {
        match self {
            Api::Driver => life::awake(),
            Api::Runtime => life::wake(),
        }
    }

    /// The outcome as this API numbers it. `place` is for the debug log:
    /// which function refused what.
    fn code(self, place: impl Display, outcome: Result) -> i32 {
        let Err(error) = outcome else { return 0 };
        log::debug(1, || format!("{place} answers {:?}", super::error::runtime_name(error.code())));
        match self {
            Api::Driver => error.driver(),
            Api::Runtime => {
                thread::with(|thread| thread.last_error.set(error.code()));
                error.code()
            }
        }
    }
}

/// A function that both APIs may have. The runtime's wakes CUDA; for the driver it must be awake.
pub fn answer(api: Api, name: &str, work: impl FnOnce(Api) -> Result) -> i32 {
    api.code(name, guarded(|| api.wake().and_then(|()| work(api))))
}

/// A function of both that only looks things up, awake or not.
pub fn answer_query(api: Api, name: &str, work: impl FnOnce(Api) -> Result) -> i32 {
    api.code(name, guarded(|| work(api)))
}

/// A runtime function. The first one wakes CUDA.
#[track_caller]
pub fn runtime(work: impl FnOnce() -> Result) -> i32 {
    runtime_query(|| life::wake().and_then(|()| work()))
}

/// A runtime function that only looks things up, and does not wake CUDA.
#[track_caller]
pub fn runtime_query(work: impl FnOnce() -> Result) -> i32 {
    Api::Runtime.code(Location::caller(), guarded(work))
}

/// A driver function. `cuInit` or a runtime function must have woken CUDA.
#[track_caller]
pub fn driver(work: impl FnOnce() -> Result) -> i32 {
    driver_query(|| life::awake().and_then(|()| work()))
}

/// `cuInit`.
pub fn driver_init() -> i32 {
    driver_query(life::wake)
}

/// A driver function that may be called before `cuInit`.
#[track_caller]
pub fn driver_query(work: impl FnOnce() -> Result) -> i32 {
    Api::Driver.code(Location::caller(), guarded(work))
}
