//! Copies and fills, at once or in stream order.

use super::memory::product;
use crate::gpu::boundary::{Api, In};
use crate::gpu::work::{self, Action, Rows, Shape};
use crate::gpu::{Result, context};

/// Work on the default stream that the host waits for.
pub fn at_once(action: &Action) -> Result {
    context::bind()?;
    work::guard()?;
    action.check()?;
    action.perform()?;
    work::synchronize_stream(0)
}

/// Work on a stream.
pub fn later(api: Api, stream: u64, action: Action) -> Result {
    api.device()?;
    action.check()?;
    work::submit(stream, action)
}

/// Copies in stream order, one after the other: where to, where from, and
/// how many bytes, `count` of each.
pub fn batch(api: Api, [dsts, srcs, sizes]: [In<u64>; 3], count: usize, stream: u64) -> Result {
    api.device()?;
    let ends = dsts.list(count).into_iter().zip(srcs.list(count));
    ends.zip(sizes.list(count))
        .try_for_each(|((dst, src), size)| later(api, stream, Action::copy(dst, src, size)))
}

/// A fill with a value of `unit` bytes.
#[derive(Clone, Copy)]
pub struct Fill {
    dst: Rows,
    value: u32,
    unit: u8,
    width: u64,
    height: u64,
}

impl Fill {
    /// One row.
    pub fn line(addr: u64, value: u32, unit: u8, width: u64) -> Self {
        Self { dst: Rows::line(addr), value, unit, width, height: 1 }
    }

    /// Rows with a pitch; `width` and `height` count values and rows.
    pub fn plane(addr: u64, pitch: u64, value: u32, unit: u8, (width, height): (u64, u64)) -> Self {
        Self { dst: Rows::plane(addr, pitch), value, unit, width, height }
    }

    fn action(self) -> Result<Action> {
        let width = product(&[self.width, self.unit.into()])?;
        Ok(Action::Fill {
            dst: self.dst,
            pattern: self.value.to_le_bytes(),
            unit: self.unit,
            shape: Shape::plane(width, self.height),
        })
    }

    /// The host waits for it.
    pub fn now(self, api: Api) -> Result {
        api.needs_context()?;
        at_once(&self.action()?)
    }

    /// In stream order.
    pub fn later(self, api: Api, stream: u64) -> Result {
        api.device()?;
        later(api, stream, self.action()?)
    }
}
