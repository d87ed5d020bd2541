//! A walk for the stacks that rules don't lead through. Those are a fiber's or a signal handler's,
//! whose bounds nobody knows; signal frames; and code with odd tables, or with none.
//!
//! It is as slow as it is careful. A word is read directly only where the thread's own stack is
//! known to be; any other comes through a [`Window`]. The walk goes by rules as far as they lead,
//! which knows three registers of a frame. Where the tables ask for another one it begins again,
//! with all registers and the tables themselves. A frame that can't be proven ends it: what lies
//! further out is cut.
//!
//! What it finds is never taken for known in the next walk. A stack that isn't the thread's own may
//! be another one by then, at the same place.

use std::cell::Cell;

use gimli::{
    CfaRule, Encoding, Evaluation, EvaluationResult, EvaluationStorage, Format, Piece, Reader,
    RegisterRule, UnwindExpression, Value, X86_64,
};

use crate::bytes::Bytes;
use crate::registers::{Here, Registers, word};
use crate::room::Room;
use crate::rules::{Outcome, Rule, rule_for};
use crate::tables::{self, Row};
use memtrace_libraries::objects::Object;
use memtrace_os::checked::{Process, Window};

/// More frames than this are never followed.
pub(super) const MAX_FRAMES: usize = 1 << 14;

/// Registers that tables name: by number as in the ABI, the last one the return address.
const REGISTERS: usize = 17;
const FP: usize = 6;
const SP: usize = 7;
const PC: usize = 16;
/// Those that a function leaves as they were, besides the stack pointer.
const KEPT: [usize; 6] = [3, FP, 12, 13, 14, 15];
/// Frames of signals that are followed: each may lead to another stack.
const SIGNALS: usize = 16;

/// A frame: what is known of its registers.
#[derive(Clone, Copy, Debug)]
struct Frame {
    known: [Option<u64>; REGISTERS],
    /// It was interrupted, so it is at an instruction and not behind a call.
    interrupted: bool,
}

impl Frame {
    fn of(here: &Here) -> Frame {
        let mut known = [None; REGISTERS];
        for (register, value) in KEPT.into_iter().zip(here.kept) {
            known[register] = Some(value);
        }
        (known[SP], known[PC]) = (Some(here.sp), Some(here.pc));
        Frame { known, interrupted: false }
    }

    fn pc(&self) -> u64 {
        self.known[PC].unwrap_or(0)
    }

    fn sp(&self) -> u64 {
        self.known[SP].unwrap_or(0)
    }
}

/// How a step ended.
#[allow(
    clippy::large_enum_variant,
    reason = "most steps end at a caller, and nothing is to be allocated"
)]
enum Next {
    Caller(Frame),
    /// This was the outermost frame.
    End,
    /// It takes a register that is not known.
    Missing,
    /// Nothing says how to go on, or what does can't be true.
    Unknown,
}

/// Memory that frames lie in.
struct Stack<'w> {
    window: &'w Window<'w>,
    /// This much is the thread's own stack, in use.
    own: std::ops::Range<u64>,
    /// Looks at expressions that the walk has left.
    left: &'w Cell<u32>,
}

impl Stack<'_> {
    fn word(&self, at: u64) -> Option<u64> {
        if at >= self.own.start && at.checked_add(8)? <= self.own.end {
            // SAFETY: the part of the thread's own stack that is in use.
            return Some(unsafe { word(at) });
        }
        self.window.word(at)
    }
}

/// Shows the frames of the calling thread from `here` on outwards, innermost first: where each goes
/// on, and its stack pointer. `None` says that it begins again. Ends when `visit` says so. Returns
/// whether it came to the outermost frame or was asked to end.
pub fn walk(room: &Room, here: &Here, visit: &mut dyn FnMut(Option<(u64, u64)>) -> bool) -> bool {
    let (process, left) = (Process::default(), Cell::new(MAX_LOOKS));
    for thorough in [false, true] {
        let window = Window::new(&process);
        let mut stack = Stack { window: &window, own: room.in_use(here.sp), left: &left };
        match follow(room, &mut stack, Frame::of(here), thorough, visit) {
            Next::Missing if !thorough => _ = visit(None),
            end => return matches!(end, Next::End),
        }
    }
    false
}

fn follow(
    room: &Room,
    stack: &mut Stack<'_>,
    mut frame: Frame,
    thorough: bool,
    visit: &mut dyn FnMut(Option<(u64, u64)>) -> bool,
) -> Next {
    let mut signals = 0;
    for _ in 0..MAX_FRAMES {
        if visit(Some((frame.pc(), frame.sp()))) {
            return Next::End;
        }
        let next = match (thorough, frame.interrupted) {
            (false, false) => by_rule(stack, room, &frame),
            _ => by_tables(stack, &frame),
        };
        let Next::Caller(caller) = next else { return next };
        if stack.left.get() == 0 {
            return Next::Unknown; // registers may be missing only because of that
        }
        if caller.interrupted {
            signals += 1;
            if signals > SIGNALS {
                return Next::Unknown;
            }
            stack.own = room.in_use(caller.sp());
        } else if caller.sp() <= frame.sp() {
            // A caller's frame lies further out, so a walk can't run in a circle.
            return Next::Unknown;
        }
        frame = caller;
    }
    Next::Unknown
}

fn by_rule(stack: &Stack<'_>, room: &Room, frame: &Frame) -> Next {
    let rule = rule_for(frame.pc(), room);
    let fp = frame.known[FP];
    if rule == Rule::UNKNOWN {
        return by_tables(stack, frame);
    }
    if rule.needs_fp() && fp.is_none() {
        return Next::Missing;
    }
    let here = Registers { pc: frame.pc(), sp: frame.sp(), fp: fp.unwrap_or(0) };
    match rule.step(here, |at| stack.word(at)) {
        Outcome::Caller(caller) => {
            let mut known = [None; REGISTERS];
            (known[PC], known[SP]) = (Some(caller.registers.pc), Some(caller.registers.sp));
            known[FP] = if caller.fp_at == 0 { fp } else { Some(caller.registers.fp) };
            Next::Caller(Frame { known, interrupted: false })
        }
        Outcome::End(_) => Next::End,
        Outcome::Unknown => Next::Unknown,
    }
}

fn by_tables(stack: &Stack<'_>, frame: &Frame) -> Next {
    let pc = frame.pc();
    // A return address may be the first of the next function: the call is before it.
    let at = if frame.interrupted { pc } else { pc.wrapping_sub(1) };
    let said = tables::look_up(stack.window, at, |row| by_row(stack, frame, row));
    said.or_else(|| kernel_frame(stack, frame)).unwrap_or(Next::Unknown)
}

/// Why a value is not known.
enum Lost {
    /// It takes a register that is not known.
    Missing,
    /// It can't be.
    Wrong,
}

fn by_row(stack: &Stack<'_>, frame: &Frame, row: &Row<'_>) -> Next {
    if let None | Some(RegisterRule::Undefined) = row.row.register(X86_64::RA) {
        return Next::End;
    }
    let cfa = match row.row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            register_of(frame, register.0).map(|base| base.wrapping_add_signed(*offset))
        }
        CfaRule::Expression(e) => evaluate(stack, frame, row, e, None),
    };
    let cfa = match cfa {
        Ok(cfa) => cfa,
        Err(Lost::Missing) => return Next::Missing,
        Err(Lost::Wrong) => return Next::Unknown,
    };
    let mut known = [None; REGISTERS];
    for (i, place) in known.iter_mut().enumerate() {
        match caller_register(stack, frame, row, cfa, i) {
            Ok(value) => *place = value,
            Err(lost) if i == PC || i == SP => {
                return if matches!(lost, Lost::Missing) { Next::Missing } else { Next::Unknown };
            }
            Err(_) => {}
        }
    }
    match (known[PC], known[SP]) {
        (Some(0), _) => Next::End,
        (Some(_), Some(_)) => Next::Caller(Frame { known, interrupted: row.signal }),
        _ => Next::Unknown,
    }
}

/// A register of the caller's, if the tables say where it is.
fn caller_register(
    stack: &Stack<'_>,
    frame: &Frame,
    row: &Row<'_>,
    cfa: u64,
    i: usize,
) -> Result<Option<u64>, Lost> {
    let memory = |at: u64| stack.word(at).map(Some).ok_or(Lost::Wrong);
    match row.row.register(gimli::Register(i as u16)) {
        None if i == SP => Ok(Some(cfa)),
        None | Some(RegisterRule::SameValue) if KEPT.contains(&i) => Ok(frame.known[i]),
        Some(RegisterRule::SameValue) => Ok(frame.known[i]),
        Some(RegisterRule::Offset(offset)) => memory(cfa.wrapping_add_signed(offset)),
        Some(RegisterRule::ValOffset(offset)) => Ok(Some(cfa.wrapping_add_signed(offset))),
        Some(RegisterRule::Register(other)) => register_of(frame, other.0).map(Some),
        Some(RegisterRule::Expression(e)) => memory(evaluate(stack, frame, row, &e, Some(cfa))?),
        Some(RegisterRule::ValExpression(e)) => {
            evaluate(stack, frame, row, &e, Some(cfa)).map(Some)
        }
        _ => Ok(None),
    }
}

fn register_of(frame: &Frame, i: u16) -> Result<u64, Lost> {
    frame.known.get(usize::from(i)).ok_or(Lost::Wrong)?.ok_or(Lost::Missing)
}

/// Room for an expression: compilers need two or three values.
struct Small;
impl<R: Reader> EvaluationStorage<R> for Small {
    type Stack = [Value; 16];
    type ExpressionStack = [(R, R); 1];
    type Result = [Piece<R>; 1];
}

/// Operations of an expression: more are a loop.
const MAX_OPERATIONS: u32 = 1 << 10;
/// Looks at expressions in one walk, of which an operation takes one or more: all registers
/// of all frames may have such a loop.
const MAX_LOOKS: u32 = 1 << 16;

fn evaluate(
    stack: &Stack<'_>,
    frame: &Frame,
    row: &Row<'_>,
    expression: &UnwindExpression<usize>,
    begin: Option<u64>,
) -> Result<u64, Lost> {
    let before = stack.window.looks();
    let value = evaluate_with(stack, frame, row, expression, begin, stack.left.get());
    let looks = before - stack.window.looks();
    stack.left.set(stack.left.get().saturating_sub(looks));
    value
}

fn evaluate_with(
    stack: &Stack<'_>,
    frame: &Frame,
    row: &Row<'_>,
    expression: &UnwindExpression<usize>,
    begin: Option<u64>,
    most: u32,
) -> Result<u64, Lost> {
    let encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };
    let code = expression.get(row.frames).map_err(|_| Lost::Wrong)?;
    let mut machine = Evaluation::<Bytes<'_>, Small>::new_in(code.0, encoding);
    machine.set_max_iterations(MAX_OPERATIONS.min(most));
    if let Some(begin) = begin {
        machine.set_initial_value(begin);
    }
    let mut state = machine.evaluate();
    loop {
        state = match state.map_err(|_| Lost::Wrong)? {
            EvaluationResult::Complete => break,
            EvaluationResult::RequiresMemory { address, size, space: None, .. } => {
                let all = stack.word(address).ok_or(Lost::Wrong)?;
                let bits = 64 - 8 * u32::from(size.clamp(1, 8));
                machine.resume_with_memory(Value::Generic(all << bits >> bits))
            }
            EvaluationResult::RequiresRegister { register, .. } => {
                machine.resume_with_register(Value::Generic(register_of(frame, register.0)?))
            }
            _ => return Err(Lost::Wrong),
        };
    }
    let value = machine.value_result().ok_or(Lost::Wrong)?;
    value.to_u64(u64::MAX).map_err(|_| Lost::Wrong)
}

/// The step out of a frame of the kernel's whose code nobody has described. What a signal's handler
/// returns to is known by its two instructions. The registers lie where the kernel's interface has
/// them (`ucontext_t`).
fn kernel_frame(stack: &Stack<'_>, frame: &Frame) -> Option<Next> {
    /// Move 15 (`rt_sigreturn`) to rax, and the system call.
    const CODE: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
    /// Where the registers begin, and whose they are.
    const REGISTERS_AT: u64 = 40;
    const ORDER: [usize; REGISTERS] = [8, 9, 10, 11, 12, 13, 14, 15, 5, 4, FP, 3, 1, 0, 2, SP, PC];
    let mut code = [0; 9];
    stack.window.bytes(frame.pc(), &mut code)?;
    if code != CODE {
        return None;
    }
    let mut known = [None; REGISTERS];
    for (i, register) in ORDER.into_iter().enumerate() {
        let at = frame.sp().checked_add(REGISTERS_AT + 8 * i as u64)?;
        known[register] = Some(stack.word(at)?);
    }
    Some(Next::Caller(Frame { known, interrupted: true }))
}

/// One step out of a function of this object at `pc`, whose stack pointer is `sp` and whose other
/// registers are made up. For tests of tables, which need no process.
pub fn step_in(window: &Window<'_>, object: &Object, pc: u64, sp: u64) -> Option<Here> {
    let frame = Frame::of(&Here { kept: [sp, sp + 64, 3, pc, 0, u64::MAX], sp, pc });
    let left = Cell::new(MAX_LOOKS);
    let stack = Stack { window, own: 0..0, left: &left };
    match tables::in_object(window, object, pc, |row| by_row(&stack, &frame, row))? {
        Next::Caller(caller) => {
            let kept = KEPT.map(|register| caller.known[register].unwrap_or(0));
            Some(Here { kept, sp: caller.sp(), pc: caller.pc() })
        }
        _ => None,
    }
}
