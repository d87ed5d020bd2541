//! What the four numbers of an event say, by kind.
//!
//! An event has the words `addr`, `size`, `extra` and `stream`, and each kind means something else
//! by them. A view gives them their names: it is read from an event, and makes one. Whatever else
//! an event says (device, stack, time …) is added where it is made:
//!
//! ```
//! use memtrace_format::event::{BlockEvent, Event, Kind};
//!
//! let block = BlockEvent { addr: 0x200, asked: 100, size: 512, stream: 0 };
//! let event = Event { device: 1, ..block.event(Kind::Alloc) };
//! assert_eq!((event.size, event.extra), (100, 512));
//! assert_eq!(BlockEvent::of(&event), block);
//! ```

use super::{Event, FLAG_PROCESSES, Kind, Layer, Point, What};

macro_rules! views {
    ($(
        $(#[$doc:meta])*
        $name:ident: $layer:ident $what:ident $(($kind:ident))? { $($(#[$about:meta])* $field:ident: $word:ident,)* }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$about])* pub $field: u64,)* }

        impl $name {
            /// What such an event says.
            #[inline]
            pub const fn of(event: &Event) -> $name {
                $name { $($field: event.$word,)* }
            }
        }

        views!(@make $name $layer $what $($kind)? { $($field: $word,)* });
    )*};
    (@make $name:ident $layer:ident $what:ident { $($field:ident: $word:ident,)* }) => {
        impl $name {
            /// An event of this kind that says so, and nothing else.
            #[inline]
            pub const fn event(self, kind: Kind) -> Event {
                Event {
                    what: What::$what,
                    $($word: self.$field,)*
                    ..Event::new(kind, Layer::$layer)
                }
            }
        }
    };
    (@make $name:ident $layer:ident $what:ident $kind:ident { $($field:ident: $word:ident,)* }) => {
        impl $name {
            /// An event that says so, and nothing else.
            #[inline]
            pub const fn event(self) -> Event {
                Event {
                    what: What::$what,
                    $($word: self.$field,)*
                    ..Event::new(Kind::$kind, Layer::$layer)
                }
            }
        }
    };
}

views! {
    /// A block of the framework's allocator comes or goes.
    BlockEvent: Framework Device {
        /// Its first address.
        addr: addr,
        /// Bytes that were asked for, as it came.
        asked: size,
        /// Bytes that it has.
        size: extra,
        /// The raw stream handle.
        stream: stream,
    }

    /// A segment of the framework's allocator, or pages of an expandable one, come or go.
    SegmentEvent: Framework Device {
        /// The first address.
        addr: addr,
        /// Bytes.
        size: size,
        /// The first address of the reservation, of pages.
        reservation: extra,
        /// The raw stream handle.
        stream: stream,
    }

    /// The framework's allocator had no memory for a request.
    OomEvent: Framework Device (Oom) {
        /// Bytes that were asked for, rounded.
        asked: size,
        /// Bytes that the device had free.
        free: extra,
    }

    /// A free waits for a CUDA event.
    WaitEvent: Framework Device (WaitsFor) {
        /// The block's first address.
        block: addr,
        /// The CUDA event's handle.
        handle: extra,
        /// The stream that the CUDA event was recorded on.
        stream: stream,
    }

    /// A block whose free was pending is free.
    CompletedEvent: Framework Device (FreeCompleted) {
        /// The block's first address.
        block: addr,
    }

    /// Somebody looked at the allocator's state through PyTorch's interface.
    SnapshotEvent: Framework Device (Snapshot) {
        /// Bytes in active blocks.
        active: size,
    }

    /// A CUDA event has completed.
    ReadyEvent: Framework Device (EventReady) {
        /// Its handle.
        handle: extra,
    }

    /// The driver had no memory for a call: with [`super::FLAG_FAILED`].
    RefusalEvent: Device Device {
        /// Bytes that were asked for.
        asked: size,
        /// The driver's answer.
        answer: extra,
        /// Bytes that the device had free; 0 if that isn't known.
        free: addr,
    }

    /// A handle to physical memory comes, gains or loses a reference, or is there.
    HandleEvent: Device Device {
        /// The handle.
        handle: addr,
        /// Bytes.
        size: size,
        /// Of one that is there: how often it is mapped.
        mappings: extra,
        /// Of one that comes: how many references it begins with.
        references: stream,
    }

    /// Physical memory is mapped.
    MappingEvent: Device Device (Map) {
        /// The first address.
        addr: addr,
        /// Bytes.
        size: size,
        /// The handle of the memory; 0 if that isn't known.
        handle: extra,
        /// Where in that memory it begins.
        offset: stream,
    }

    /// Memory that the driver gives comes or goes.
    MemoryEvent: Device Device {
        /// Its address, or its handle.
        addr: addr,
        /// Bytes.
        size: size,
        /// The context that it is in; of memory in stream order, the pool that it is from.
        inside: extra,
        /// The raw stream handle, of memory in stream order.
        stream: stream,
    }

    /// A range of addresses is reserved, is not any more, or loses its memory.
    RangeEvent: Device Device {
        /// The first address.
        addr: addr,
        /// Bytes.
        size: size,
    }

    /// Something without a size comes or goes.
    ObjectEvent: Device Device {
        /// Its handle.
        handle: addr,
        /// The context that it is in, as it comes; 0 if that isn't known.
        context: extra,
    }

    /// One of NCCL's communicators comes.
    CommunicatorEvent: Device Communicator (Create) {
        /// Its handle.
        handle: addr,
        /// How many ranks it has.
        ranks: size,
        /// Which of them this process is.
        rank: stream,
    }

    /// A pool says how much it keeps.
    PoolEvent: Device MemoryPool (PoolReserved) {
        /// Its handle.
        handle: addr,
        /// Bytes.
        reserved: size,
    }

    /// All that a context has goes.
    ResetEvent: Device Device (Reset) {
        /// Its handle; 0 if that isn't known.
        context: extra,
    }

    /// A block of a framework's allocator of page-locked memory comes.
    HostBlockEvent: Host HostBlock (Alloc) {
        /// Its first address.
        addr: addr,
        /// Bytes that were asked for.
        asked: size,
        /// Its allocator's handle.
        handle: extra,
    }

    /// Such a block goes.
    HostFreeEvent: Host HostBlock (FreeRequested) {
        /// Its allocator's handle.
        handle: addr,
    }

    /// The program passes a point that it has named.
    MarkEvent: Framework Device (Mark) {
        /// The label whose name it has.
        label: addr,
        /// A number of the program's.
        number: size,
        /// Which kind of point it is: a [`super::Point`].
        kind: extra,
    }
}

impl MarkEvent {
    /// Which kind of point it is, if that is known.
    pub fn point(&self) -> Option<Point> {
        Point::from_u64(self.kind)
    }
}

/// A device says how full it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredEvent {
    /// Bytes in use.
    pub used: u64,
    /// Bytes that it has.
    pub total: u64,
    /// Of those in use, what this process has and what others have; `None` if that wasn't said.
    pub by: Option<(u64, u64)>,
}

impl MeasuredEvent {
    /// What such an event says.
    pub fn of(event: &Event) -> MeasuredEvent {
        let by = (event.flags & FLAG_PROCESSES != 0).then_some((event.addr, event.stream));
        MeasuredEvent { used: event.size, total: event.extra, by }
    }

    /// An event that says so, and nothing else.
    pub fn event(self) -> Event {
        let (addr, stream) = self.by.unwrap_or_default();
        let flags = if self.by.is_some() { FLAG_PROCESSES } else { 0 };
        let event = Event::new(Kind::Measured, Layer::Device);
        Event { size: self.used, extra: self.total, addr, stream, flags, ..event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_reads_what_it_has_made() {
        let wait = WaitEvent { block: 1, handle: 2, stream: 3 };
        let event = wait.event();
        assert_eq!((event.kind, event.layer), (Kind::WaitsFor, Layer::Framework));
        assert_eq!((event.addr, event.extra, event.stream), (1, 2, 3));
        assert_eq!(WaitEvent::of(&event), wait);
        for by in [None, Some((5, 6))] {
            let said = MeasuredEvent { used: 11, total: 20, by };
            assert_eq!(MeasuredEvent::of(&said.event()), said);
        }
    }
}
