//! Which rank a process is, where only NCCL knows.
//!
//! A launcher says it in the environment; who starts processes on his own (`mp.spawn`) passes
//! it as an argument. It comes by when the process joins a communicator. The largest one that
//! it joined is taken for the world: a part of it has fewer ranks. There may be two of that
//! size in which it has different ranks. Either both are parts, as in a pipeline, where each
//! pair of neighbours has a communicator. Or it has several ranks, with a device for each.
//! Then its rank isn't known. Nor is it where its device has a higher number than the
//! communicator has ranks: there are others, then.

use crate::key::Memtrace;

/// What the process said as it joined the largest communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// Its rank.
    pub rank: u32,
    /// Of so many.
    pub ranks: u32,
    /// On this device; −1 is one that no call has named.
    pub device: i8,
    /// It has joined another one of that size, as another rank.
    pub several: bool,
}

const NUMBER: u32 = 24;
const IS_KNOWN: u64 = 1 << 63;
const IS_SEVERAL: u64 = 1 << 62;

impl World {
    /// In a word of a black box's header; there 0 is none.
    pub fn pack(self) -> u64 {
        let several = if self.several { IS_SEVERAL } else { 0 };
        let device = u64::from(self.device.cast_unsigned()) << (2 * NUMBER);
        let number = |n: u32| u64::from(n) & ((1 << NUMBER) - 1);
        IS_KNOWN | several | device | number(self.ranks) << NUMBER | number(self.rank)
    }

    /// The other way.
    pub fn unpack(word: u64) -> Option<World> {
        let number = |shift: u32| (word >> shift & ((1 << NUMBER) - 1)) as u32;
        (word & IS_KNOWN != 0).then(|| World {
            rank: number(0),
            ranks: number(NUMBER),
            device: ((word >> (2 * NUMBER)) as u8).cast_signed(),
            several: word & IS_SEVERAL != 0,
        })
    }

    /// What is known after joining another communicator.
    #[must_use]
    pub fn after(self, before: Option<World>) -> Option<World> {
        match before {
            _ if self.ranks < 2 || self.rank >= self.ranks || self.ranks >> NUMBER != 0 => before,
            Some(old) if old.ranks > self.ranks => Some(old),
            Some(old) if old.ranks == self.ranks => {
                Some(World { several: old.several || old.rank != self.rank, ..old })
            }
            _ => Some(self),
        }
    }

    /// Adds `rank`, `world_size` and `rank_device` to what is known of a process.
    /// What its environment says counts first.
    pub fn tell(self, about: &mut Memtrace) {
        if self.several {
            return;
        }
        let is_a_part = i64::from(self.device) >= i64::from(self.ranks);
        let rank = Some(u64::from(self.rank));
        if about.rank.is_none() && !is_a_part {
            (about.rank, about.world_size) = (rank, Some(self.ranks.into()));
        }
        if about.rank == rank && self.device >= 0 {
            about.rank_device = Some(self.device.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn joins(all: &[(u32, u32, i8)]) -> Option<World> {
        let join = |before: Option<World>, (rank, ranks, device): &(u32, u32, i8)| {
            let new = World { rank: *rank, ranks: *ranks, device: *device, several: false };
            let after = new.after(before);
            assert_eq!(after.map(World::pack).and_then(World::unpack), after);
            after
        };
        all.iter().fold(None, join)
    }

    fn world_of(all: &[(u32, u32, i8)], about: Value) -> Value {
        let mut about = Memtrace::read(about).expect("an object");
        if let Some(world) = joins(all) {
            world.tell(&mut about);
        }
        serde_json::to_value(about).expect("JSON")
    }

    #[test]
    fn the_largest_communicator_is_the_world() {
        let third = json!({"rank": 3, "world_size": 4, "rank_device": 3});
        for joined in [
            &[(3, 4, 3)][..],
            &[(3, 4, 3), (1, 2, 3)],
            &[(1, 2, 3), (3, 4, 3), (0, 1, 3)],
            &[(3, 4, 3), (1, 2, 3), (0, 2, 3)],
        ] {
            assert_eq!(world_of(joined, json!({})), third, "{joined:?}");
        }
        assert_eq!(joins(&[(0, 1, 0)]), None, "alone it is no rank");
        assert_eq!(world_of(&[(1, 2, -1)], json!({})), json!({"rank": 1, "world_size": 2}));
    }

    #[test]
    fn a_process_of_several_ranks_has_none() {
        let all = [(0, 4, 0), (1, 4, 1), (2, 4, 2), (3, 4, 3)];
        assert_eq!(world_of(&all, json!({})), json!({}));
    }

    #[test]
    fn a_part_is_not_the_world() {
        // Four stages of a pipeline that only send to their neighbours.
        assert_eq!(world_of(&[(1, 2, 2), (0, 2, 2)], json!({})), json!({}), "the third");
        assert_eq!(world_of(&[(1, 2, 3)], json!({})), json!({}), "the last: the fourth device");
        assert_eq!(
            world_of(&[(1, 2, 2), (0, 2, 2), (2, 4, 2)], json!({}))["rank"],
            2,
            "and then all"
        );
        // Its device's number is of use where the rank is known otherwise.
        let said = json!({"rank": 1, "world_size": 2});
        assert_eq!(world_of(&[(1, 2, 5)], said)["rank_device"], 5);
    }

    #[test]
    fn the_environment_says_it_first() {
        let said = json!({"rank": 5, "world_size": 8});
        assert_eq!(world_of(&[(1, 2, 1)], said.clone()), said);
        let with_device = json!({"rank": 1, "world_size": 8, "rank_device": 0});
        assert_eq!(world_of(&[(1, 2, 0)], json!({"rank": 1, "world_size": 8})), with_device);
    }
}
