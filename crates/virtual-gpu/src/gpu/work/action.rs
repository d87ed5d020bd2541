//! What a stream can be asked to do, and doing it.

use super::super::{LAUNCHES, Relaxed, Result, contents, memory};
use core::ffi::c_void;

/// A function of the program, to be called in stream order.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Rows of bytes: two- and three-dimensional copies and fills are lists of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    /// Bytes of a row.
    pub width: u64,
    /// Rows of a slice.
    pub height: u64,
    /// Slices.
    pub depth: u64,
}

impl Shape {
    /// One row.
    pub fn line(width: u64) -> Self {
        Self { width, height: 1, depth: 1 }
    }

    /// A slice.
    pub fn plane(width: u64, height: u64) -> Self {
        Self { width, height, depth: 1 }
    }

    fn rows(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.depth).flat_map(move |z| (0..self.height).map(move |y| (y, z)))
    }

    fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

/// Where rows lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rows {
    /// Address of the first row.
    pub addr: u64,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// Bytes from one slice to the next.
    pub slice: u64,
}

impl Rows {
    /// A place for one row.
    pub fn line(addr: u64) -> Self {
        Self { addr, pitch: 0, slice: 0 }
    }

    /// A place for one slice.
    pub fn plane(addr: u64, pitch: u64) -> Self {
        Self { addr, pitch, slice: 0 }
    }

    fn row(self, (y, z): (u64, u64)) -> u64 {
        self.addr + y * self.pitch + z * self.slice
    }

    /// Bytes from the first to behind the last.
    fn extent(self, shape: Shape) -> u64 {
        if shape.is_empty() {
            return 0;
        }
        (shape.depth - 1) * self.slice + (shape.height - 1) * self.pitch + shape.width
    }

    /// All rows lie in memory that is allocated.
    pub fn check(self, shape: Shape) -> Result {
        memory::ledger().check(self.addr, self.extent(shape))
    }
}

/// One piece of work.
#[derive(Clone, Debug)]
pub enum Action {
    /// A kernel: computes nothing, but may have written anywhere.
    Kernel {
        /// The function's handle or host address; 0 for a library's own.
        function: u64,
        /// Blocks, threads, dynamic shared memory.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Dynamic shared memory, bytes.
        shared: u32,
    },
    /// A copy between any two places.
    Copy {
        /// To.
        dst: Rows,
        /// From.
        src: Rows,
        /// How much.
        shape: Shape,
    },
    /// A fill with one, two or four bytes, over and over.
    Fill {
        /// Where.
        dst: Rows,
        /// With what; the first `unit` bytes count.
        pattern: [u8; 4],
        /// 1, 2 or 4.
        unit: u8,
        /// How much.
        shape: Shape,
    },
    /// Words written by the stream itself (`cuStreamWriteValue`).
    Write {
        /// Where.
        addr: u64,
        /// What; the first `len` bytes count.
        value: u64,
        /// 4 or 8.
        len: u8,
    },
    /// A call of the program's function.
    Host {
        /// The function.
        function: HostFunction,
        /// Its argument, as an address.
        data: usize,
    },
    /// An event is recorded.
    Record(u64),
    /// An event is waited for, and all work is over at once: nothing.
    Wait(u64),
    /// Memory of a graph begins to exist.
    Allocate(u64),
    /// Memory of a graph ceases to exist.
    Free(u64),
    /// Another graph's work, in its place.
    Child(u64),
    /// Work that depends on a value on the device, which nobody computes: the first body is taken.
    Conditional(Vec<u64>),
    /// Nothing: a point to meet.
    Empty,
}

impl Action {
    /// A kernel of a library that needs no name.
    pub fn kernel() -> Self {
        Action::Kernel { function: 0, grid: [1; 3], block: [1; 3], shared: 0 }
    }

    /// A copy of one row.
    pub fn copy(dst: u64, src: u64, len: u64) -> Self {
        Action::Copy { dst: Rows::line(dst), src: Rows::line(src), shape: Shape::line(len) }
    }

    /// A fill of one row with one byte.
    pub fn fill(dst: u64, byte: u8, len: u64) -> Self {
        let dst = Rows::line(dst);
        Action::Fill { dst, pattern: [byte; 4], unit: 1, shape: Shape::line(len) }
    }

    /// The places that it names lie in memory that is allocated.
    pub fn check(&self) -> Result {
        match *self {
            Action::Copy { dst, src, shape } => dst.check(shape).and_then(|()| src.check(shape)),
            Action::Fill { dst, shape, .. } => dst.check(shape),
            Action::Write { addr, len, .. } => memory::ledger().check(addr, len.into()),
            _ => Ok(()),
        }
    }

    /// `cudaGraphNodeType`.
    pub fn node_type(&self) -> i32 {
        match self {
            Action::Kernel { .. } => 0,
            Action::Copy { .. } => 1,
            Action::Fill { .. } => 2,
            Action::Host { .. } => 3,
            Action::Child(_) => 4,
            Action::Empty => 5,
            Action::Wait(_) => 6,
            Action::Record(_) => 7,
            Action::Allocate(_) => 10,
            Action::Free(_) => 11,
            Action::Write { .. } => 12,
            Action::Conditional(_) => 13,
        }
    }

    /// Does it. No lock may be held: this may call the program.
    pub fn perform(&self) -> Result {
        match *self {
            Action::Kernel { .. } => {
                LAUNCHES.fetch_add(1, Relaxed);
            }
            Action::Copy { dst, src, shape } => {
                for row in shape.rows() {
                    contents::copy(dst.row(row), src.row(row), shape.width);
                }
            }
            Action::Fill { dst, pattern, unit, shape } => {
                let pattern = &pattern[..usize::from(unit)];
                for row in shape.rows() {
                    contents::fill(dst.row(row), pattern, shape.width / u64::from(unit));
                }
            }
            Action::Write { addr, value, len } => {
                contents::write(addr, &value.to_le_bytes()[..usize::from(len)]);
            }
            Action::Host { function, data } => {
                // SAFETY: the program gave the function and its argument for exactly this call.
                unsafe { function(core::ptr::with_exposed_provenance_mut(data)) }
            }
            Action::Record(event) => super::record_now(event),
            Action::Allocate(addr) => memory::ledger().materialise(addr)?,
            Action::Free(addr) => memory::ledger().dematerialise(addr)?,
            // A child's and a conditional's work stands beside them in an executable graph.
            Action::Wait(_) | Action::Child(_) | Action::Conditional(_) | Action::Empty => {}
        }
        Ok(())
    }
}
