//! Unwind tables (`.eh_frame`, `.eh_frame_hdr`), read as if they were lies.
//!
//! They are the compiler's, the assembler's or a program's own, and some are wrong: what they say
//! is a claim, and so is where they lie. Every byte of them comes through a [`Window`], which can't
//! fault and has an end. A claim that can't be read, or that isn't one, is no claim. Nothing here
//! allocates, and the only lock is the loader's, before glibc 2.35.
//!
//! Code that no loaded object has may have tables that were registered, as compilers in the process
//! do. The C runtime's list of them is never asked, only our own ([`super::registered`]). That is
//! asked only if the code itself can be read, because tables most often lie beside their code and
//! go with it.
//!
//! Which code registered tables are about is worked out when code without any other is first met,
//! and kept. Then only the tables that seem to be about an address are searched for it, entry by
//! entry.

use gimli::{
    BaseAddresses, EhFrame, EhFrameHdr, FrameDescriptionEntry, Pointer, Reader, Register,
    RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow, X86_64,
};

use super::registered::{self, Registered};
use crate::bytes::Bytes;
use memtrace_libraries::objects::{Object, object_at};
use memtrace_os::checked::Window;

/// Storage for reading a table without allocation: x86-64 has 17 registers that a table can name.
pub struct OnStack;
impl UnwindContextStorage<usize> for OnStack {
    type Rules = [(Register, RegisterRule<usize>); 24];
    type Stack = [UnwindTableRow<usize, Self>; 3];
}

/// What tables say of one instruction.
pub struct Row<'a> {
    /// Where the registers of the caller are.
    pub row: &'a UnwindTableRow<usize, OnStack>,
    /// Where expressions are.
    pub frames: &'a EhFrame<Bytes<'a>>,
    /// The frame is one that the kernel made for a signal's handler to
    /// return to: its caller was interrupted.
    pub signal: bool,
}

/// What the tables of the process say of the instruction at `pc`.
pub fn look_up<T>(window: &Window<'_>, pc: u64, f: impl FnOnce(&Row<'_>) -> T) -> Option<T> {
    if let Some(object) = object_at(pc) {
        return loaded(window, &object, pc, f);
    }
    window.byte(pc)?;
    registered(window, pc, f)
}

/// What those of a loaded object say, which stays true until it is unloaded.
pub fn loaded<T>(
    window: &Window<'_>,
    object: &Object,
    pc: u64,
    f: impl FnOnce(&Row<'_>) -> T,
) -> Option<T> {
    super::epoch::met(object.start, object.end);
    in_object(window, object, pc, f)
}

/// What the tables of this object say.
pub fn in_object<T>(
    window: &Window<'_>,
    object: &Object,
    pc: u64,
    f: impl FnOnce(&Row<'_>) -> T,
) -> Option<T> {
    let part = |at: u64| -> Option<Bytes<'_>> {
        let length = object.end.checked_sub(at).filter(|n| at >= object.start && *n > 0)?;
        Some(Bytes::new(window, at, length))
    };
    let bases = BaseAddresses::default().set_eh_frame_hdr(object.eh_frame_hdr);
    let header = EhFrameHdr::<Bytes<'_>>::from(part(object.eh_frame_hdr)?).parse(&bases, 8).ok()?;
    let Pointer::Direct(eh_frame) = header.eh_frame_ptr() else { return None };
    let bases = bases.set_eh_frame(eh_frame);
    let frames = EhFrame::from(part(eh_frame)?);
    let index = header.table()?;
    // An index that claims to be larger than the object is none.
    if index.iter(&bases).size_hint().0 as u64 > object.end - object.start {
        return None;
    }
    let Pointer::Direct(entry) = index.lookup(pc, &bases).ok()? else { return None };
    in_frames(&frames, &bases, entry.checked_sub(eh_frame)? as usize, pc, f)
}

/// What the entry at this offset says.
fn in_frames<'a, T>(
    frames: &'a EhFrame<Bytes<'a>>,
    bases: &BaseAddresses,
    entry: usize,
    pc: u64,
    f: impl FnOnce(&Row<'_>) -> T,
) -> Option<T> {
    let entry: FrameDescriptionEntry<Bytes<'_>> =
        frames.fde_from_offset(bases, entry.into(), EhFrame::cie_from_offset).ok()?;
    if !entry.contains(pc) || entry.cie().return_address_register() != X86_64::RA {
        return None;
    }
    let mut context = UnwindContext::<usize, OnStack>::new_in();
    let row = entry.unwind_info_for_address(frames, bases, &mut context, pc).ok()?;
    Some(f(&Row { row, frames, signal: entry.is_signal_trampoline() }))
}

/// What registered tables say.
fn registered<T>(window: &Window<'_>, pc: u64, f: impl FnOnce(&Row<'_>) -> T) -> Option<T> {
    let spend = |n| window.spend(n);
    let find = |tables: &Registered| {
        let mut found = None;
        let _ended = each_entry(window, tables, &mut |entry| {
            let is_it = entry.parse(window, tables).is_some_and(|e| e.contains(pc));
            found = is_it.then_some((*entry, *tables));
            is_it
        });
        found
    };
    let (entry, tables) = registered::each(pc, spend, |tables| code_of(window, tables), find)?;
    let (frames, bases) = entry.frames(window, &tables);
    in_frames(&frames, &bases, entry.offset(), pc, f)
}

/// Which code registered tables are about: from the lowest to the one after the highest address;
/// none if they can't be read any more. `None` if nothing more may be looked at.
fn code_of(window: &Window<'_>, tables: &Registered) -> Option<(u64, u64)> {
    const ANY: (u64, u64) = (0, 1 << 47);
    if window.is_spent() {
        return None;
    }
    let (mut from, mut to) = (ANY.1, ANY.0);
    let _ended = each_entry(window, tables, &mut |entry| {
        if let Some(e) = entry.parse(window, tables)
            && let Some(end) = e.initial_address().checked_add(e.len()).filter(|end| *end <= ANY.1)
        {
            (from, to) = (from.min(e.initial_address()), to.max(end));
        }
        false
    });
    // Large ones are searched as far as that goes.
    Some(if window.is_spent() { ANY } else { (from, to) })
}

/// An entry of registered tables: where it and its common part begin, and where it ends.
#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    common: u64,
    end: u64,
}

impl Entry {
    fn offset(&self) -> usize {
        (self.at - self.common) as usize
    }

    /// What both lie in.
    fn frames<'w>(
        &self,
        window: &'w Window<'_>,
        tables: &Registered,
    ) -> (EhFrame<Bytes<'w>>, BaseAddresses) {
        let bases = BaseAddresses::default().set_eh_frame(self.common);
        let bases = bases.set_text(tables.text).set_got(tables.data);
        (EhFrame::from(Bytes::new(window, self.common, self.end - self.common)), bases)
    }

    fn parse<'w>(
        &self,
        window: &'w Window<'_>,
        tables: &Registered,
    ) -> Option<FrameDescriptionEntry<Bytes<'w>>> {
        let (frames, bases) = self.frames(window, tables);
        frames.fde_from_offset(&bases, self.offset().into(), EhFrame::cie_from_offset).ok()
    }
}

/// Shows the entries of registered tables until `visit` says that it is enough, or they end, or
/// can't be read. `None`: they did not end.
fn each_entry(
    window: &Window<'_>,
    tables: &Registered,
    visit: &mut dyn FnMut(&Entry) -> bool,
) -> Option<()> {
    if !tables.is_list {
        return each_in(window, tables.at, visit);
    }
    let mut at = tables.at;
    loop {
        match window.word(at)? {
            0 => return Some(()),
            section => each_in(window, section, visit)?,
        }
        at = at.checked_add(8)?;
    }
}

fn each_in(window: &Window<'_>, mut at: u64, visit: &mut dyn FnMut(&Entry) -> bool) -> Option<()> {
    loop {
        // An entry is its length, how far back its common part lies, and
        // the rest. Of a common part that is 0.
        let mut head = Bytes::new(window, at, 8);
        let length = match head.read_u32().ok()? {
            0 => return Some(()),
            length @ ..0xffff_fff0 => u64::from(length),
            _ => return None,
        };
        let back = u64::from(head.read_u32().ok()?);
        let end = at.checked_add(4 + length)?;
        if back != 0
            && let Some(common) = (at + 4).checked_sub(back)
            && common < at
            && visit(&Entry { at, common, end })
        {
            return None;
        }
        at = end;
    }
}
