//! Stacks and frames: each is made once, by its number in the tree and by what
//! it says, however often a file has it.

use super::{
    At, Decoder, Fields, Frame, FrameIx, Item, ListId, Literal, PIECE, Place, Result, StackIx,
    inside, shape,
};
use crate::snapshot::NO_LINE;

impl Decoder<'_, '_> {
    /// The stack under `frames`; an empty list is an empty stack.
    pub(super) fn stack<const N: usize>(&mut self, fields: &Fields<N>) -> Result<Option<StackIx>> {
        let Some(item) = fields.get(Literal::Frames) else { return Ok(None) };
        let place = || fields.at.key(Literal::Frames);
        let id = match (item, self.tables) {
            (Item::List(id), _) => id,
            (Item::Int(n), Some((stacks, _))) => match self.numbered(stacks, n) {
                Some(Item::List(id)) => id,
                _ => return Err(shape(place(), format!("{n} is no stack of `stacks`"))),
            },
            _ => return Err(self.wrong(fields, Literal::Frames, "a list")),
        };
        if let Some((part, ix)) = self.stacks[id.0 as usize]
            && part == self.part
        {
            return Ok(Some(ix));
        }
        let mut frames = Vec::new();
        for &item in self.tree.list(id) {
            let item = match (item, self.tables) {
                (Item::Int(n), Some((_, all))) => self
                    .numbered(all, n)
                    .ok_or_else(|| shape(place(), format!("{n} is no frame of `frames`")))?,
                _ => item,
            };
            frames.push(self.frame(item, place)?);
        }
        self.use_memory(2 * size_of::<FrameIx>() * frames.len() + PIECE)?;
        let all = &mut self.snapshot.stacks;
        let ix = *self.equal_stacks.entry(frames).or_insert_with_key(|frames| {
            all.push(frames.clone());
            all.len() as StackIx - 1
        });
        self.stacks[id.0 as usize] = Some((self.part, ix));
        Ok(Some(ix))
    }

    /// An element of a table.
    pub(super) fn numbered(&self, table: ListId, n: i64) -> Option<Item> {
        self.tree.list(table).get(usize::try_from(n).ok()?).copied()
    }

    /// The stack of a block or segment, where an empty list says that there is none.
    pub(super) fn live_stack<const N: usize>(
        &mut self,
        fields: &Fields<N>,
    ) -> Result<Option<StackIx>> {
        match fields.get(Literal::Frames) {
            Some(Item::List(id)) if self.tree.list(id).is_empty() => Ok(None),
            _ => self.stack(fields),
        }
    }

    pub(super) fn frame(&mut self, item: Item, place: impl Fn() -> String) -> Result<FrameIx> {
        use Literal::{Filename, Line, Name};
        let Item::Dict(id) = item else {
            let what = format!("a frame is {}", self.tree.describe(item));
            return Err(shape(place(), what));
        };
        if let Some((part, ix)) = self.frames[id.0 as usize]
            && part == self.part
        {
            return Ok(ix);
        }
        let ix = self.snapshot.frames.len() as FrameIx;
        let others = self.snapshot.other.len();
        let fields = self
            .fields(id, At(Place::Frame(ix)), [Name, Filename, Line])
            .map_err(|e| inside(e, &place))?;
        let frame = self.frame_fields(&fields).map_err(|e| inside(e, &place))?;
        self.use_text(2 * (frame.name.len() + frame.filename.len()))?;
        self.use_memory(2 * size_of::<Frame>())?;
        // A frame with further keys is one of its own.
        let known = if self.snapshot.other.len() > others {
            ix
        } else {
            *self.equal_frames.entry(frame.clone()).or_insert(ix)
        };
        if known == ix {
            self.snapshot.frames.push(frame);
        }
        self.frames[id.0 as usize] = Some((self.part, known));
        Ok(known)
    }

    pub(super) fn frame_fields(&self, fields: &Fields<3>) -> Result<Frame> {
        let text = |key| match fields.need(key)? {
            Item::Text(id) => Ok(self.tree.text(id).to_owned()),
            _ => Err(self.wrong(fields, key, "a string")),
        };
        let line = match fields.need(Literal::Line)? {
            // What PyTorch writes for a line that Python doesn't know.
            Item::Int(-1) => NO_LINE,
            _ => self.unsigned(fields, Literal::Line)?,
        };
        Ok(Frame { name: text(Literal::Name)?, filename: text(Literal::Filename)?, line })
    }
}
