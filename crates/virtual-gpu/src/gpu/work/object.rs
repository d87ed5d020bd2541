//! User objects: things of the program that graphs keep alive.

use super::{HostFunction, Work};
use crate::gpu::{Error, Result};

/// A counted thing with a destructor.
pub struct Object {
    destroy: HostFunction,
    data: usize,
    references: u64,
}

/// Destructors that have to be called, when no lock is held.
#[derive(Default)]
#[must_use = "the program's destructors must be called"]
pub struct Destructors(Vec<(HostFunction, usize)>);

impl Destructors {
    pub(super) fn and(mut self, other: Destructors) -> Destructors {
        self.0.extend(other.0);
        self
    }

    /// Calls them.
    pub fn call(self) {
        for (destroy, data) in self.0 {
            // SAFETY: the program gave the destructor and its argument for exactly this call.
            unsafe { destroy(core::ptr::with_exposed_provenance_mut(data)) }
        }
    }
}

impl Work {
    /// `cudaUserObjectCreate`.
    pub fn create_object(
        &mut self,
        destroy: HostFunction,
        data: usize,
        references: u32,
    ) -> Result<u64> {
        if references == 0 {
            return Err(Error::INVALID_VALUE);
        }
        Ok(self.objects.insert(Object { destroy, data, references: references.into() }))
    }

    /// `cudaUserObjectRetain`.
    pub fn retain_object(&mut self, object: u64, count: u32) -> Result {
        let found = self.objects.get_mut(object).ok_or(Error::INVALID_VALUE)?;
        found.references += u64::from(count);
        Ok(())
    }

    /// `cudaUserObjectRelease`.
    pub fn release_object(&mut self, object: u64, count: u32) -> Result<Destructors> {
        let found = self.objects.get_mut(object).ok_or(Error::INVALID_VALUE)?;
        found.references =
            found.references.checked_sub(count.into()).ok_or(Error::INVALID_VALUE)?;
        if found.references > 0 {
            return Ok(Destructors::default());
        }
        let destructors = (found.destroy, found.data);
        self.objects.remove(object);
        Ok(Destructors(vec![destructors]))
    }

    /// `cudaGraphRetainUserObject`: the graph takes references over (`moved`) or adds its own.
    pub fn graph_retains(&mut self, graph: u64, object: u64, count: u32, moved: bool) -> Result {
        self.graph(graph)?;
        if self.objects.get(object).is_none() || count == 0 {
            return Err(Error::INVALID_VALUE);
        }
        if !moved {
            self.retain_object(object, count)?;
        }
        self.graph_mut(graph)?.objects.push((object, count));
        Ok(())
    }

    /// `cudaGraphReleaseUserObject`.
    pub fn graph_releases(&mut self, graph: u64, object: u64, count: u32) -> Result<Destructors> {
        let held = &mut self.graph_mut(graph)?.objects;
        let place = held.iter().position(|held| held.0 == object && held.1 >= count);
        let place = place.ok_or(Error::INVALID_VALUE)?;
        held[place].1 -= count;
        if held[place].1 == 0 {
            held.remove(place);
        }
        self.release_object(object, count)
    }
}
