//! Names of our hooks that several loaded libraries define: which function
//! each library means by one.
//!
//! A library may have its own function of CUDA's name, and a process may have two
//! versions of cuBLAS or a second runtime. All their users are bound to our one symbol.
//! Most calls are distinguished by their caller (`routes.rs`), but not all. A call at a
//! function's end is a jump, and comes from the function before; and an address that was
//! put into a table is called from anywhere.
//!
//! So for such names, and only for those, the GOT slots that the loader has bound to us are
//! rebound. They then lead where the loader would have led them: to our trampoline for a function
//! of CUDA's, or to another library's function itself.
//!
//! This is done when the program begins, and when libraries have come: at the next look-up by name,
//! as for `deepbind.rs`, and when a caller is new. Most processes have no such name and pay for a
//! look at each library's table of symbols.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::cuda::table::{Api, ENTRY_POINTS, Hooks, ROWS};
use crate::cuda::{resolve, routes};
use crate::libraries::elf::{Binding, Tables};
use crate::libraries::loaded;
use crate::libraries::scopes;
use crate::os::locks::Turn;

/// Libraries that have been looked at: how many the loader had loaded and
/// unloaded by then, and how many it knew. These and [`DEFINED`] are written by one thread at a
/// time, whose turn it is ([`LOOKING`]); others only ask whether to look.
static SEEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// Libraries that define a row's name: none, one of NVIDIA's, or more than that is enough for.
static DEFINED: [AtomicU8; ROWS] = [const { AtomicU8::new(NOBODY) }; ROWS];
const NOBODY: u8 = 0;
const ONE_OF_NVIDIAS: u8 = 1;
const SEVERAL: u8 = 2;

/// A library's GOT slot for a row, bound to us.
struct GotSlot {
    row: usize,
    library: usize,
    place: usize,
}

/// Held by the thread that looks.
static LOOKING: Turn = Turn::new(());

/// Looks at the libraries that are new.
pub fn look(hooks: &Hooks) {
    let now = loaded::counts();
    let is_new = || SEEN.iter().zip(now).any(|(seen, now)| seen.load(Ordering::Acquire) != now);
    if !is_new() {
        return;
    }
    let Some(_turn) = LOOKING.try_lock() else { return };
    routes::forget_if_unloaded();
    let from =
        if SEEN[1].load(Ordering::Relaxed) == now[1] { KNOWN.load(Ordering::Relaxed) } else { 0 };
    if from == 0 {
        for row in &DEFINED {
            row.store(NOBODY, Ordering::Relaxed);
        }
    }
    let (count, is_changed) = define(from);
    let (slots, all_bound) = slots(hooks, if is_changed { 0 } else { from });
    let is_done = (slots.is_empty() || rebind(hooks, &slots)) && all_bound;
    if is_done || is_enough(now) {
        KNOWN.store(count, Ordering::Relaxed);
        for (seen, now) in SEEN.iter().zip(now) {
            seen.store(now, Ordering::Release);
        }
    } else {
        KNOWN.store(0, Ordering::Relaxed);
    }
}

/// The loader is at work on a library, and what it has not done yet will have to be looked at
/// again. A program may keep a library's tables writable, which looks the same: so not for ever.
fn is_enough([loaded, unloaded]: [u64; 2]) -> bool {
    const LOOKS: u32 = 8;
    static OF: AtomicU64 = AtomicU64::new(0);
    static LEFT: AtomicU32 = AtomicU32::new(0);
    if OF.swap(loaded + unloaded, Ordering::Relaxed) != loaded + unloaded {
        LEFT.store(LOOKS, Ordering::Relaxed);
    }
    LEFT.fetch_sub(1, Ordering::Relaxed) == 1
}

/// Notes which names the libraries define, from a place in the loader's list on. Returns how many
/// libraries there are, and whether a name has come to mean several functions.
fn define(from: usize) -> (usize, bool) {
    let mut is_changed = false;
    let count = loaded::visit_from(from, |path, tables| {
        if loaded::is_own(tables.start()) {
            return false;
        }
        let is_nvidias = || resolve::is_one_of_nvidias(path, tables);
        for row in defined_by(tables) {
            let before = DEFINED[row].load(Ordering::Relaxed);
            let now = if before == NOBODY && is_nvidias() { ONE_OF_NVIDIAS } else { SEVERAL };
            is_changed |= now == SEVERAL && before != SEVERAL;
            DEFINED[row].store(now, Ordering::Relaxed);
        }
        false
    });
    (count, is_changed)
}

fn defined_by(tables: &Tables) -> impl Iterator<Item = usize> {
    (1..ROWS).filter(|row| tables.symbol(ENTRY_POINTS[*row].symbol).is_some())
}

/// GOT slots for names that mean several functions, as far as they are bound to us. Also
/// returns whether the loader has bound all.
fn slots(hooks: &Hooks, from: usize) -> (Vec<GotSlot>, bool) {
    let (mut found, mut all_bound) = (Vec::new(), true);
    let several = |row: &usize| DEFINED[*row].load(Ordering::Relaxed) == SEVERAL;
    let rows: Vec<usize> = (1..ROWS).filter(several).collect();
    if rows.is_empty() {
        return (found, true);
    }
    loaded::visit_from(from, |_, tables| {
        for slot in tables.references().filter(|_| !loaded::is_own(tables.start())) {
            let row = rows.iter().find(|row| ENTRY_POINTS[**row].symbol == slot.name);
            let Some(row) = row else { continue };
            if is_ours(hooks, *row, &slot, tables) {
                found.push(GotSlot { row: *row, library: tables.start(), place: slot.place });
            }
            all_bound &= slot.is_settled();
        }
        false
    });
    (found, all_bound)
}

/// Does a call through this slot come to us, or will it when the loader has bound it? What the
/// loader does for a library that was opened with `RTLD_DEEPBIND` is not known here.
fn is_ours(hooks: &Hooks, row: usize, slot: &Binding, tables: &Tables) -> bool {
    let will_be = || loaded::is_own(hooks[row].exported.0 as usize) && !scopes::DEEP.is_used();
    loaded::is_own(slot.target()) || slot.is_lazy && tables.contains(slot.target()) && will_be()
}

/// Points slots where the loader would have pointed them. The loader is asked before its list is
/// gone through again, in which a library can't go away. Returns whether all could be rebound.
fn rebind(hooks: &Hooks, slots: &[GotSlot]) -> bool {
    let find = |all: &scopes::Libraries<'_>, slot: &GotSlot| {
        let row = &ENTRY_POINTS[slot.row];
        let found = resolve::bound_among(all, row, slot.library)?;
        Some((found, resolve::is_cudas_among(all, row, found)))
    };
    let found = scopes::ask(|all| slots.iter().map(|slot| find(all, slot)).collect::<Vec<_>>());
    let target = |(slot, found): (&GotSlot, Option<(usize, bool)>)| {
        let (found, is_cudas) = found?;
        let api = Api::from_number(slot.row)?;
        Some(if is_cudas { routes::trampoline_for(hooks, api, found) } else { found })
    };
    let targets: Vec<Option<usize>> =
        slots.iter().zip(found.unwrap_or_default()).map(target).collect();
    let mut all_rebound = true;
    loaded::visit(|_, tables| {
        let own = slots.iter().zip(&targets).filter(|(slot, _)| slot.library == tables.start());
        let own: Vec<_> = own.collect();
        for slot in tables.references().filter(|_| !own.is_empty()) {
            if let Some((wanted, Some(target))) =
                own.iter().find(|(own, _)| own.place == slot.place)
                && is_ours(hooks, wanted.row, &slot, tables)
            {
                all_rebound &= slot.bind(*target);
            }
        }
        false
    });
    all_rebound
}
