//! Where a [`State`] keeps what is alive: blocks, segments and pages by
//! device, all else in the driver's ledger.

use super::{DeviceState, LiveBlock, LiveSegment, MappedPage, State};
use crate::framework::{PAGE, Waits};
use crate::ledger::{LiveEntries, MemoryKind, Move};
use memtrace_format::blackbox::Class;
use memtrace_format::event::{
    BlockEvent, Event, FLAG_PENDING, FLAG_SMALL, Kind, NO_LABEL, Pool, SegmentEvent, StackId,
    WaitEvent,
};

impl LiveEntries for State {
    fn get(&self, class: Class, key: u64) -> Option<Event> {
        match class {
            Class::Block => self.one(|n, d| Some(d.blocks.get(&key)?.event(n, key))),
            Class::Segment => self.one(|n, d| Some(d.segments.get(&key)?.event(n, key))),
            Class::Page => self.one(|n, d| Some(d.pages.get(&key)?.event(n, key))),
            Class::Wait => self.waiting.get(&key).map(|(device, addr)| wait(*device, *addr, key)),
            _ => self.ledger.get(class, key),
        }
    }

    fn put(&mut self, class: Class, key: u64, event: &Event) -> Option<Event> {
        match class {
            Class::Block => {
                let device = self.device_with(event.device)?;
                let new = LiveBlock::of(event);
                let before = self.devices[device].blocks.insert(key, new);
                self.forget_waits(key, before);
                // Addresses are unique over all devices.
                let other = || self.elsewhere(key, device);
                before.map(|block| block.event(device, key)).or_else(other)
            }
            Class::Segment => {
                let device = self.device_with(event.device)?;
                let before = self.remove(class, key);
                let state = &mut self.devices[device];
                state.private |= event.pool != Pool::DEFAULT;
                state.segments.insert(key, LiveSegment::of(event));
                self.moves.push(Some(framework_move(device, event.size, event.stack, true)));
                before
            }
            Class::Page => {
                let device = self.device_with(event.device)?;
                let before = self.remove(class, key);
                let state = &mut self.devices[device];
                state.private |= event.pool != Pool::DEFAULT;
                state.pages.insert(key, MappedPage::of(event));
                self.moves.push(Some(framework_move(device, PAGE, event.stack, true)));
                before
            }
            Class::Wait => {
                let mut devices = self.devices.iter_mut().enumerate();
                let (device, block) = devices
                    .find_map(|(number, d)| Some((number, d.blocks.get_mut(&event.addr)?)))?;
                let before = self.waiting.insert(key, (device, event.addr));
                block.waits += u32::from(before.is_none());
                before.map(|(device, addr)| wait(device, addr, key))
            }
            _ => self.ledger.put(class, key, event),
        }
    }

    fn update(&mut self, class: Class, key: u64, change: &dyn Fn(&mut Event)) {
        match class {
            Class::Block => {
                let block = self.devices.iter_mut().find_map(|d| d.blocks.get_mut(&key));
                if let Some(block) = block {
                    let mut event = block.event(0, key);
                    change(&mut event);
                    *block = LiveBlock { waits: block.waits, ..LiveBlock::of(&event) };
                }
            }
            Class::Segment | Class::Page | Class::Wait => {} // they never change
            _ => self.ledger.update(class, key, change),
        }
    }

    fn remove(&mut self, class: Class, key: u64) -> Option<Event> {
        let mut devices = self.devices.iter_mut().enumerate();
        match class {
            Class::Block => {
                let (device, block) =
                    devices.find_map(|(number, d)| Some((number, d.blocks.remove(&key)?)))?;
                self.forget_waits(key, Some(block));
                Some(block.event(device, key))
            }
            Class::Segment => {
                let (device, segment) =
                    devices.find_map(|(number, d)| Some((number, d.segments.remove(&key)?)))?;
                let gone = framework_move(device, segment.size, segment.stack, false);
                self.moves.push(Some(gone));
                Some(segment.event(device, key))
            }
            Class::Page => {
                let (device, page) =
                    devices.find_map(|(number, d)| Some((number, d.pages.remove(&key)?)))?;
                self.moves.push(Some(framework_move(device, PAGE, page.stack, false)));
                Some(page.event(device, key))
            }
            Class::Wait => {
                let (device, addr) = self.waiting.remove(&key)?;
                if let Some(block) = self.devices[device].blocks.get_mut(&addr) {
                    block.waits = block.waits.saturating_sub(1);
                }
                Some(wait(device, addr, key))
            }
            _ => self.ledger.remove(class, key),
        }
    }

    fn select(&self, class: Class, is: &dyn Fn(&Event) -> bool) -> Vec<u64> {
        let all: Vec<u64> = match class {
            Class::Block => self.devices.iter().flat_map(|d| d.blocks.keys()).copied().collect(),
            Class::Segment => {
                self.devices.iter().flat_map(|d| d.segments.keys()).copied().collect()
            }
            Class::Page => self.devices.iter().flat_map(|d| d.pages.keys()).copied().collect(),
            Class::Wait => self.waiting.keys().copied().collect(),
            _ => return self.ledger.select(class, is),
        };
        all.into_iter().filter(|key| self.get(class, *key).is_some_and(|e| is(&e))).collect()
    }
}

impl Waits for State {
    fn waits(&self, block: u64) -> usize {
        let block = self.devices.iter().find_map(|d| d.blocks.get(&block));
        block.map_or(0, |block| block.waits as usize)
    }
}

impl State {
    /// What the first device that has it says.
    fn one(&self, find: impl Fn(usize, &DeviceState) -> Option<Event>) -> Option<Event> {
        self.devices.iter().enumerate().find_map(|(number, d)| find(number, d))
    }

    /// Takes a block out that is on another device than this.
    fn elsewhere(&mut self, key: u64, device: usize) -> Option<Event> {
        let mut others = self.devices.iter_mut().enumerate().filter(|(n, _)| *n != device);
        let (number, block) = others.find_map(|(n, d)| Some((n, d.blocks.remove(&key)?)))?;
        self.forget_waits(key, Some(block));
        Some(block.event(number, key))
    }

    /// A block that goes before its events are ready (its history has a
    /// hole) leaves none of them behind.
    fn forget_waits(&mut self, addr: u64, gone: Option<LiveBlock>) {
        if gone.is_some_and(|block| block.waits > 0) {
            self.waiting.retain(|_, (_, block)| *block != addr);
        }
    }

    /// The device with this ordinal, made if it isn't there yet; `None` if no device can have it.
    pub(super) fn device_with(&mut self, ordinal: i8) -> Option<usize> {
        let device = usize::try_from(ordinal).ok()?;
        if self.devices.len() <= device {
            self.devices.resize_with(device + 1, DeviceState::default);
        }
        Some(device)
    }
}

fn ordinal(device: usize) -> i8 {
    i8::try_from(device).unwrap_or(-1)
}

fn wait(device: usize, block: u64, handle: u64) -> Event {
    Event { device: ordinal(device), ..WaitEvent { block, handle, stream: 0 }.event() }
}

impl LiveBlock {
    fn of(event: &Event) -> LiveBlock {
        let BlockEvent { asked: requested, size, stream, .. } = BlockEvent::of(event);
        let Event { stack, label, .. } = *event;
        let pending = event.flags & FLAG_PENDING != 0;
        LiveBlock { size, requested, stream, stack, label, pending, waits: 0 }
    }

    fn event(&self, device: usize, addr: u64) -> Event {
        let LiveBlock { size, requested: asked, stream, stack, label, pending, .. } = *self;
        let flags = if pending { FLAG_PENDING } else { 0 };
        let block = BlockEvent { addr, asked, size, stream }.event(Kind::Alloc);
        Event { device: ordinal(device), flags, stack, label, ..block }
    }
}

impl LiveSegment {
    fn of(event: &Event) -> LiveSegment {
        let Event { size, stream, stack, pool, .. } = *event;
        LiveSegment { size, stream, stack, small: event.flags & FLAG_SMALL != 0, pool }
    }

    fn event(&self, device: usize, addr: u64) -> Event {
        let LiveSegment { size, stream, stack, small, pool } = *self;
        let flags = if small { FLAG_SMALL } else { 0 };
        let piece = SegmentEvent { addr, size, reservation: 0, stream }.event(Kind::SegmentAlloc);
        Event { device: ordinal(device), flags, pool, stack, ..piece }
    }
}

impl MappedPage {
    fn of(event: &Event) -> MappedPage {
        let SegmentEvent { reservation, stream, .. } = SegmentEvent::of(event);
        let Event { stack, pool, .. } = *event;
        MappedPage { reservation, stream, stack, small: event.flags & FLAG_SMALL != 0, pool }
    }

    fn event(&self, device: usize, addr: u64) -> Event {
        let MappedPage { reservation, stream, stack, small, pool } = *self;
        let flags = if small { FLAG_SMALL } else { 0 };
        let piece = SegmentEvent { addr, size: PAGE, reservation, stream }.event(Kind::SegmentMap);
        Event { device: ordinal(device), flags, pool, stack, ..piece }
    }
}

pub(super) fn framework_move(device: usize, bytes: u64, stack: StackId, came: bool) -> Move {
    let device = Some(ordinal(device));
    Move { device, kind: MemoryKind::Framework, stack, label: NO_LABEL, bytes, came, part: 0 }
}
