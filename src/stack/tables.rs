//! Unwind tables (`.eh_frame`, `.eh_frame_hdr`), read as if they were lies.
//!
//! They are the compiler's, the assembler's or a program's own, and some are wrong: what they say is a claim, and so is where they
//! lie. Every byte of them comes through a [`Window`], which can't fault and has an end; a claim that can't be
//! read, or that isn't one, is no claim. Nothing here allocates.
//!
//! Code that no loaded object has may have tables that were registered (`__register_frame`), as compilers in the process
//! do. The C runtime's list of them is asked only if the code itself can be read: tables
//! most often lie beside their code and go with it.

use std::ffi::c_void;

use gimli::{
    BaseAddresses, EhFrame, EhFrameHdr, FrameDescriptionEntry, Pointer, Reader, Register,
    RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow, X86_64,
};

use super::checked::{Bytes, Window};
use super::objects::{Object, object_at};

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
    /// The frame is one that the kernel made for a signal's handler to return to: its caller was interrupted.
    pub signal: bool,
}

/// What the tables of the process say of the instruction at `pc`.
pub fn look_up<T>(window: &Window<'_>, pc: u64, f: impl FnOnce(&Row<'_>) -> T) -> Option<T> {
    if object_at(pc).is_some() {
        return loaded(window, pc, f);
    }
    window.byte(pc)?;
    registered(window, pc, f)
}

/// What those of loaded objects say, which stays true until they are unloaded.
pub fn loaded<T>(window: &Window<'_>, pc: u64, f: impl FnOnce(&Row<'_>) -> T) -> Option<T> {
    let object = object_at(pc)?;
    super::modules::met(object.start, object.end);
    in_object(window, &object, pc, f)
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
        Some(window.from(at, length))
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
    #[repr(C)]
    struct Found {
        text: u64,
        data: u64,
        function: u64,
    }
    unsafe extern "C" {
        fn _Unwind_Find_FDE(pc: *const c_void, found: *mut Found) -> *const c_void;
    }
    let mut found = Found { text: 0, data: 0, function: 0 };
    // SAFETY: the C runtime's own search, which fills the record as all versions have had it. It returns an entry that
    // the program has promised to be there, of which nothing is believed.
    let entry = unsafe { _Unwind_Find_FDE(pc as *const c_void, &raw mut found) } as u64;
    if entry == 0 {
        return None;
    }
    // An entry is its length, how far back its common part lies, and the rest.
    let mut head = window.from(entry, 8);
    let (length, back) = (head.read_u32().ok()?, head.read_u32().ok()?);
    let start = (entry + 4).checked_sub(u64::from(back))?;
    let frames = EhFrame::from(window.from(start, (entry - start) + 4 + u64::from(length)));
    let bases =
        BaseAddresses::default().set_eh_frame(start).set_text(found.text).set_got(found.data);
    in_frames(&frames, &bases, (entry - start) as usize, pc, f)
}
