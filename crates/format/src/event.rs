//! One fixed-size record of something that happened to GPU memory.
//!
//! An event is eight 64-bit words, because a word is what a processor publishes whole. The ring
//! keeps each slot as eight atomics and never needs a lock or an `unsafe` read. Word 0 belongs to
//! the ring (it is the slot's sequence number); an event owns words 1 to 7. The layout is written
//! to a file that outlives the process, so it changes only together with [`LAYOUT_VERSION`].

mod views;

use crate::numbered::numbered;

pub use views::{
    BlockEvent, CommunicatorEvent, CompletedEvent, HandleEvent, HostBlockEvent, HostFreeEvent,
    MappingEvent, MarkEvent, MeasuredEvent, MemoryEvent, ObjectEvent, OomEvent, PoolEvent,
    RangeEvent, ReadyEvent, RefusalEvent, ResetEvent, SegmentEvent, SnapshotEvent, WaitEvent,
};

/// Version of the word layout below; a reader refuses any other.
pub const LAYOUT_VERSION: u32 = 4;

/// Words in a slot of the ring, word 0 (the ring's own sequence number) included.
pub const WORDS: usize = 8;

/// Id of a call stack in the depot; [`NO_STACK`] where none was taken.
pub type StackId = u32;

/// The stack id of an event that carries no stack.
pub const NO_STACK: StackId = 0;

/// What the program said it was doing: a named range in the tree of labels
/// ([`crate::labels`]); [`NO_LABEL`] if nothing.
pub type LabelId = u32;

/// The label of an event outside any named range.
pub const NO_LABEL: LabelId = 0;

numbered! {
    /// What happened. The names are those of PyTorch's trace entries where PyTorch has one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Kind {
        /// A block was handed out. `size` is what was asked for, `extra` the rounded block size; of
        /// a [`What::HostBlock`], its allocator's handle.
        Alloc = 1,
        /// The program gave a block back. `extra` is the block size; of a [`What::HostBlock`],
        /// `addr` is the handle. Unless [`FLAG_PENDING`] is set the block is free at once, which
        /// PyTorch writes as a second entry, `free_completed`.
        FreeRequested = 2,
        /// The block `addr`, whose free was pending, may be handed out again.
        FreeCompleted = 3,
        /// A segment came from the driver.
        SegmentAlloc = 4,
        /// A segment went back to the driver.
        SegmentFree = 5,
        /// Physical memory was mapped into a reserved range, whose first address is `extra`.
        SegmentMap = 6,
        /// Physical memory was unmapped from a reserved range.
        SegmentUnmap = 7,
        /// An allocation failed for want of memory. `size` is the rounded
        /// request, `extra` what the device had free.
        Oom = 8,
        /// The block `addr`, whose free was requested, also waits for the CUDA event
        /// whose handle is `extra`, on `stream`.
        WaitsFor = 9,
        /// The CUDA event whose handle is `extra` has completed; a block
        /// that waited for it alone is free.
        EventReady = 10,
        /// A handle to physical memory: `addr` is the handle, `size` the memory's, `stream` how
        /// many references it begins with (1). A handle that is there already gains a reference.
        HandleCreate = 11,
        /// One more reference to the handle `addr`.
        HandleRetain = 12,
        /// One reference to the handle `addr` fewer.
        HandleRelease = 13,
        /// Physical memory was mapped: its handle is `extra`, the offset in it `stream`.
        Map = 14,
        /// The mappings that make up this range went.
        Unmap = 15,
        /// A range of addresses was reserved.
        Reserve = 16,
        /// A reserved range went.
        Unreserve = 17,
        /// Something without a size that can be known was made ([`What`]
        /// says what); `addr` is its handle.
        Create = 18,
        /// It went.
        Destroy = 19,
        /// The program asked the pool `addr` how much it has reserved, and the answer was `size`.
        PoolReserved = 20,
        /// Everything in the context `extra` went; with [`What::Device`], in
        /// all of the device's primary context.
        Reset = 21,
        /// A device said how full it is: `size` bytes of `extra` are in use. With
        /// [`FLAG_PROCESSES`], `addr` of them by this process and `stream` by others.
        Measured = 22,
        /// The process used a device for the first time: from here on its
        /// primary context may be there.
        Entered = 23,
        /// Somebody looked at the allocator's state through PyTorch's
        /// interface: `size` bytes are in active blocks.
        Snapshot = 24,
        /// The program passed a point that it named: `addr` is the label whose name that is, `size`
        /// a number, `extra` which kind of point ([`Point`]).
        Mark = 25,
    }
}

impl Kind {
    /// Memory comes with it, or would have.
    #[inline]
    pub const fn takes(self) -> bool {
        matches!(
            self,
            Kind::Alloc
                | Kind::SegmentAlloc
                | Kind::SegmentMap
                | Kind::HandleCreate
                | Kind::Map
                | Kind::Oom
        )
    }

    /// Memory goes with it, or is given back.
    #[inline]
    pub const fn gives_back(self) -> bool {
        matches!(
            self,
            Kind::FreeRequested
                | Kind::SegmentFree
                | Kind::SegmentUnmap
                | Kind::HandleRelease
                | Kind::Unmap
                | Kind::Destroy
                | Kind::Reset
        )
    }
}

numbered! {
    /// Which kind of point a [`Kind::Mark`] is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Point {
        /// A moment with a name.
        Moment = 1,
        /// A step of the training loop begins; the event's `size` is its number.
        Step = 2,
        /// A phase begins.
        Begin = 3,
        /// A phase ends.
        End = 4,
    }
}

impl Point {
    /// The kind of point with this number, if there is one.
    pub fn from_u64(n: u64) -> Option<Point> {
        Point::from_u8(u8::try_from(n).ok()?)
    }
}

numbered! {
    /// Who says so: the layer of truth an event belongs to.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Layer {
        /// PyTorch's caching allocator: its blocks and the segments they are in.
        Framework = 0,
        /// A driver or runtime call that no framework allocator made.
        Device = 1,
        /// Page-locked or managed host memory.
        Host = 2,
    }
}

numbered! {
    /// What an event of the device or host layer is about.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum What {
        /// Memory of a device; everything in the framework's layer.
        #[default]
        Device = 0,
        /// Memory of a device in stream order. `extra` is the pool, 0 for the device's current one.
        Pool = 1,
        /// Memory that moves between host and device.
        Managed = 2,
        /// An array, plain or mipmapped. `addr` is its handle, `size` the bytes of its elements.
        Array = 3,
        /// An address at which another process's memory can be reached;
        /// `size` is 0 if it was not said.
        Imported = 4,
        /// Memory of another API's or process's. `addr` is its handle.
        External = 5,
        /// An address at which memory of others can be reached, and which is freed like one's own:
        /// [`What::External`] memory, or a pool of another process's.
        View = 6,
        /// An address that a graph's allocation node will have; the memory
        /// comes when the graph runs.
        GraphNode = 7,
        /// Page-locked host memory that CUDA allocated.
        Pinned = 8,
        /// Page-locked host memory of the program's own.
        Registered = 9,
        /// A context.
        Context = 10,
        /// A module or library of kernels.
        Module = 11,
        /// An instantiated graph.
        Executable = 12,
        /// A memory pool.
        MemoryPool = 13,
        /// An object through which several devices write together; it has no memory of its own.
        Multicast = 14,
        /// One of NCCL's communicators: `size` is how many ranks it has,
        /// `stream` which one this is.
        Communicator = 15,
        /// A block of a framework's allocator of page-locked memory, in
        /// which it is. The driver doesn't see it.
        HostBlock = 16,
    }
}

impl What {
    /// Does a call that frees `self` free `other`, too?
    pub fn frees(self, other: What) -> bool {
        use What::{Array, Device, GraphNode, Managed, Pool, View};
        match self {
            // cudaFree and cuMemFree take what any of these calls gave.
            Device | Pool => matches!(other, Device | Pool | Managed | View | GraphNode),
            Array => other == Array,
            same => other == same,
        }
    }
}

/// Flag: the requested size is not known, `size` is the rounded one.
pub const FLAG_SIZE_IS_ROUNDED: u8 = 1;
/// Flag: the call failed; nothing was allocated.
pub const FLAG_FAILED: u8 = 2;
/// Flag: the free waits for work on other streams; `WaitsFor` events name what for.
pub const FLAG_PENDING: u8 = 4;
/// Flag: a segment (or mapping) for requests of at most 1 MiB, PyTorch's "small" pool.
pub const FLAG_SMALL: u8 = 8;
/// Flag: the measurement distinguishes processes.
pub const FLAG_PROCESSES: u8 = 16;
/// Flag: page-locked memory that a framework's allocator took, to hand out as [`What::HostBlock`]s.
pub const FLAG_OF_BLOCKS: u8 = 32;

/// Flag: memory went while Python ended, by no doing of the program's.
pub const FLAG_ENDING: u8 = 64;

/// What both APIs answer when memory has run out (`cudaErrorMemoryAllocation`,
/// `CUDA_ERROR_OUT_OF_MEMORY`). An `Alloc` or `HandleCreate` that failed has the result as its
/// `extra`, and as its `addr` the bytes that the device had free then (0: not known).
pub const OUT_OF_MEMORY: u64 = 2;

/// Which of an allocator's pools: PyTorch's pair of numbers, of which at most one is not 0, in 16
/// bits. The lowest says which one it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pool(pub u16);

impl Pool {
    /// The pool of every allocation that no one sent elsewhere: (0, 0).
    pub const DEFAULT: Pool = Pool(0);
    /// A pool whose numbers don't fit: a program that makes more than 32,766 of them.
    pub const UNKNOWN: Pool = Pool(u16::MAX);

    /// The pool with these numbers: (0, n) for one of the program's own, (n, 0) for a graph's.
    pub fn of(id: (u64, u64)) -> Pool {
        let code = match id {
            (0, 0) => return Pool::DEFAULT,
            (0, n) => n.checked_mul(2).map(|n| n + 1),
            (n, 0) => n.checked_mul(2),
            _ => None,
        };
        code.and_then(|n| u16::try_from(n).ok()).map_or(Pool::UNKNOWN, Pool)
    }

    /// The pair of numbers; that of the default pool where they are not known.
    pub fn id(self) -> (u64, u64) {
        let n = u64::from(self.0 >> 1);
        match self {
            Pool::UNKNOWN => (0, 0),
            Pool(code) if code & 1 == 1 => (0, n),
            Pool(_) => (n, 0),
        }
    }
}

/// One event, unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// Which layer reports it.
    pub layer: Layer,
    /// Device ordinal; −1 for host memory.
    pub device: i8,
    /// `FLAG_…` bits.
    pub flags: u8,
    /// Which API function, as an index into the hook table (0: none).
    pub api: u16,
    /// What the event is about.
    pub what: What,
    /// Of the framework's allocator: from which of its pools. Of the other
    /// layers: see [`Event::part`].
    pub pool: Pool,
    /// Wall clock, nanoseconds since 1970.
    pub time_ns: u64,
    /// Device address (host address in the host layer); 0 for `oom`.
    pub addr: u64,
    /// Bytes; see [`Kind`] for which.
    pub size: u64,
    /// Second number; see [`Kind`].
    pub extra: u64,
    /// The raw stream handle; 0 is the default stream.
    pub stream: u64,
    /// Where it happened.
    pub stack: StackId,
    /// Kernel id of the thread.
    pub thread: u32,
    /// What the thread said it was doing.
    pub label: LabelId,
}

/// Some neighbouring bits of a word. What doesn't fit loses its upper
/// bits, and never reaches another field.
struct Bits {
    at: u32,
    count: u32,
}

impl Bits {
    /// So many bits above another field.
    const fn above(below: &Bits, count: u32) -> Bits {
        Bits { at: below.at + below.count, count }
    }

    #[inline]
    const fn mask(&self) -> u32 {
        u32::MAX >> (u32::BITS - self.count)
    }

    #[inline]
    const fn put(&self, n: u32) -> u64 {
        ((n & self.mask()) as u64) << self.at
    }

    #[inline]
    const fn get(&self, word: u64) -> u32 {
        (word >> self.at) as u32 & self.mask()
    }
}

// The last word. A depot has fewer nodes than fit, and Linux gives out no
// thread's kernel id above 4,194,304.
const STACK: Bits = Bits { at: 0, count: 22 };
const THREAD: Bits = Bits::above(&STACK, 22);
const LABEL: Bits = Bits::above(&THREAD, LABEL_BITS);
/// Bits of a label: the rest of the word.
pub const LABEL_BITS: u32 = 20;
const _: () = assert!(LABEL.at + LABEL.count == u64::BITS);

// Of the first word. Its other fields are whole bytes.
const LAYER: Bits = Bits { at: 8, count: 2 };
const WHAT: Bits = Bits::above(&LAYER, 6);
const _: () = assert!(What::ALL.len() <= 1 << WHAT.count);

/// The [`Event::part`] of what was made while several communicators were at
/// work, so that it isn't known for which.
pub const ONE_OF_SEVERAL: u16 = u16::MAX;

impl Event {
    /// An event of this kind that says nothing else: every number is 0.
    #[inline]
    pub const fn new(kind: Kind, layer: Layer) -> Event {
        Event {
            kind,
            layer,
            device: 0,
            flags: 0,
            api: 0,
            what: What::Device,
            pool: Pool::DEFAULT,
            time_ns: 0,
            addr: 0,
            size: 0,
            extra: 0,
            stream: 0,
            stack: NO_STACK,
            thread: 0,
            label: NO_LABEL,
        }
    }

    /// The number of NCCL's communicator that the thread was at work for: 0 if none,
    /// [`ONE_OF_SEVERAL`] if it isn't known. A communicator itself is a
    /// [`Kind::Create`] with its own number.
    pub fn part(&self) -> u16 {
        if self.layer == Layer::Framework { 0 } else { self.pool.0 }
    }

    /// The event as words 1 to 7 of a slot.
    #[inline]
    pub fn pack(&self) -> [u64; WORDS - 1] {
        let head = u64::from(self.kind as u8)
            | LAYER.put(self.layer as u32)
            | WHAT.put(self.what as u32)
            | u64::from(self.device as u8) << 16
            | u64::from(self.flags) << 24
            | u64::from(self.api) << 32
            | u64::from(self.pool.0) << 48;
        let place = STACK.put(self.stack) | THREAD.put(self.thread) | LABEL.put(self.label);
        [head, self.time_ns, self.addr, self.size, self.extra, self.stream, place]
    }

    /// Reads words 1 to 7 of a slot; `None` if they were not written by this layout version.
    pub fn unpack(w: [u64; WORDS - 1]) -> Option<Event> {
        let head = w[0];
        Some(Event {
            kind: Kind::from_u8(head as u8)?,
            layer: Layer::from_u8(LAYER.get(head) as u8)?,
            device: (head >> 16) as i8,
            flags: (head >> 24) as u8,
            api: (head >> 32) as u16,
            what: What::from_u8(WHAT.get(head) as u8)?,
            pool: Pool((head >> 48) as u16),
            thread: THREAD.get(w[6]),
            time_ns: w[1],
            addr: w[2],
            size: w[3],
            extra: w[4],
            stream: w[5],
            stack: STACK.get(w[6]),
            label: LABEL.get(w[6]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_survives_packing() {
        let e = Event {
            kind: Kind::WaitsFor,
            layer: Layer::Host,
            device: -1,
            flags: FLAG_PENDING | FLAG_SMALL,
            api: 0xfedc,
            what: What::Multicast,
            pool: Pool(0xfffe),
            time_ns: u64::MAX - 1,
            addr: u64::MAX - 2,
            size: u64::MAX - 3,
            extra: u64::MAX - 4,
            stream: u64::MAX - 5,
            stack: STACK.mask() - 5,
            thread: THREAD.mask() - 6,
            label: LABEL.mask() - 7,
        };
        assert_eq!(Event::unpack(e.pack()), Some(e));
        // What doesn't fit harms no other field.
        let large = Event { stack: u32::MAX, thread: u32::MAX - 1, label: u32::MAX - 2, ..e };
        let [stack, thread, label] = [STACK.mask(), THREAD.mask() - 1, LABEL.mask() - 2];
        assert_eq!(Event::unpack(large.pack()), Some(Event { stack, thread, label, ..e }));
    }

    #[test]
    fn words_of_another_layout_are_refused() {
        let mut w = [0; WORDS - 1];
        assert_eq!(Event::unpack(w), None);
        w[0] = 0xff;
        assert_eq!(Event::unpack(w), None);
        w[0] = Kind::Alloc as u64 | 3 << 8;
        assert_eq!(Event::unpack(w), None);
        w[0] = Kind::Alloc as u64 | 62 << 10;
        assert_eq!(Event::unpack(w), None);
    }

    #[test]
    fn a_pool_is_its_two_numbers_as_long_as_they_fit() {
        for id in [(0, 0), (0, 1), (1, 0), (0, 32_766), (32_767, 0)] {
            assert_eq!(Pool::of(id).id(), id);
        }
        for id in [(0, 32_767), (32_768, 0), (1, 1), (u64::MAX, 0), (0, u64::MAX)] {
            assert_eq!(Pool::of(id), Pool::UNKNOWN);
        }
    }

    #[test]
    fn numbers_and_names_agree() {
        assert!(Kind::ALL.iter().all(|kind| Kind::from_u8(*kind as u8) == Some(*kind)));
        assert!(What::ALL.iter().zip(0..).all(|(what, n)| *what as usize == n));
        assert_eq!((Kind::from_u8(0), Kind::from_u8(Kind::ALL.len() as u8 + 1)), (None, None));
    }
}
