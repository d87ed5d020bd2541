//! Single values. Those of known keys have the types that they must have, those of other keys stay
//! as they are. All are counted against a budget.

use std::collections::HashMap;

use super::{
    At, Decoder, DictId, Fields, Item, ListId, Literal, MAX_DEPTH, Other, PIECE, PoolId, ReadError,
    Result, Text, VALUE, Value, shape,
};
use crate::key::{Memtrace, Part};

impl Decoder<'_, '_> {
    /// Sorts a dictionary into the keys we know and the others, which are kept.
    pub(super) fn fields<const N: usize>(
        &mut self,
        id: DictId,
        at: At,
        keys: [Literal; N],
    ) -> Result<Fields<N>> {
        let tree = self.tree;
        let mut fields = Fields { at, keys, values: [None; N] };
        let mut others = HashMap::new();
        for &(key, value) in tree.dict(id) {
            let Item::Text(text) = key else {
                let what = format!("a key is {}", tree.describe(key));
                return Err(shape(at.text(), what));
            };
            let known = self.literals[text.0 as usize];
            match known.and_then(|literal| keys.iter().position(|k| *k == literal)) {
                Some(i) => fields.values[i] = Some(value),
                None => self.other(at, tree.text(text), value, &mut others)?,
            }
        }
        Ok(fields)
    }

    /// Keeps what is under an unknown key; of one that comes twice, the last. `others` is
    /// where those of this dictionary are.
    pub(super) fn other<'k>(
        &mut self,
        at: At,
        key: &'k str,
        value: Item,
        others: &mut HashMap<&'k str, usize>,
    ) -> Result<()> {
        let value = self.value(value, key, 0)?;
        self.use_text(key.len())?;
        self.use_memory(size_of::<Other>() + size_of::<(&str, usize)>())?;
        let kept = &mut self.snapshot.other;
        if let Some(&twice) = others.get(key) {
            kept[twice].value = value;
        } else {
            others.insert(key, kept.len());
            kept.push(Other { place: at.0, key: key.to_owned(), value });
        }
        Ok(())
    }

    pub(super) fn value(&mut self, item: Item, place: &str, depth: u32) -> Result<Value> {
        let large = || shape(place, "nests too deep or shares too much");
        if depth > MAX_DEPTH {
            return Err(large());
        }
        self.values = self.values.checked_sub(1).ok_or_else(large)?;
        self.use_memory(VALUE)?;
        Ok(match item {
            Item::None => Value::Null,
            Item::Bool(b) => b.into(),
            Item::Int(n) => n.into(),
            Item::Large(n) => n.into(),
            Item::Float(x) => x.into(),
            Item::Text(id) => {
                let text = self.tree.text(id);
                self.values = self.values.checked_sub(text.len() / 16).ok_or_else(large)?;
                self.use_memory(text.len())?;
                text.into()
            }
            Item::List(ListId(_)) | Item::Tuple(_) => {
                let mut items = Vec::new();
                for &item in self.list(item, || place.to_owned())? {
                    items.push(self.value(item, place, depth + 1)?);
                }
                Value::Array(items)
            }
            Item::Dict(id) => {
                let mut map = serde_json::Map::new();
                for &(key, value) in self.tree.dict(id) {
                    let Item::Text(text) = key else {
                        let what = format!("a key is {}", self.tree.describe(key));
                        return Err(shape(place, what));
                    };
                    let value = self.value(value, place, depth + 1)?;
                    self.use_text(self.tree.text(text).len())?;
                    map.insert(self.tree.text(text).to_owned(), value);
                }
                Value::Object(map)
            }
        })
    }

    /// What is under our own key, whose parts may be larger than the file's text of them.
    pub(super) fn key(&mut self, value: Value) -> Result<Option<Box<Memtrace>>> {
        let place = Literal::Memtrace.text();
        let more = size_of::<Memtrace>().saturating_add(Memtrace::cost(&value));
        let rest = self.values.checked_sub(more / VALUE);
        self.values = rest.ok_or_else(|| shape(place, "has far more parts than words"))?;
        self.use_memory(more)?;
        Ok(Memtrace::read(value))
    }

    pub(super) fn spend(&mut self, place: &str) -> Result<()> {
        match self.budget.checked_sub(1) {
            Some(left) => self.budget = left,
            None => return Err(shape(place, "refers to the same things over and over")),
        }
        self.use_memory(PIECE)
    }

    pub(super) fn use_text(&mut self, bytes: usize) -> Result<()> {
        let more = || shape("", "the same long names are used over and over");
        self.texts = self.texts.checked_sub(bytes).ok_or_else(more)?;
        self.use_memory(bytes)
    }

    pub(super) fn use_memory(&mut self, bytes: usize) -> Result<()> {
        *self.memory = self.memory.checked_sub(bytes).ok_or(ReadError::TooLarge)?;
        Ok(())
    }

    pub(super) fn dict(&self, item: Item, at: At) -> Result<DictId> {
        match item {
            Item::Dict(id) => Ok(id),
            _ => Err(shape(at.text(), format!("{}, not a dictionary", self.tree.describe(item)))),
        }
    }

    pub(super) fn literal(&self, item: Item) -> Option<Literal> {
        match item {
            Item::Text(id) => self.literals[id.0 as usize],
            _ => None,
        }
    }

    pub(super) fn text<const N: usize>(
        &mut self,
        fields: &Fields<N>,
        key: Literal,
    ) -> Result<Option<Text>> {
        match fields.get(key) {
            None => Ok(None),
            Some(Item::Text(id)) => {
                self.use_text(self.tree.text(id).len())?;
                Ok(Some(self.tree.text(id).to_owned().into()))
            }
            Some(_) => Err(self.wrong(fields, key, "a string")),
        }
    }

    pub(super) fn unsigned<const N: usize>(&self, fields: &Fields<N>, key: Literal) -> Result<u64> {
        match fields.need(key)? {
            Item::Int(n @ 0..) => Ok(n as u64),
            Item::Large(n) => Ok(n),
            _ => Err(self.wrong(fields, key, "a number of 0 or more")),
        }
    }

    /// Where something is, and how large it is: no memory goes on behind the last address.
    pub(super) fn extent<const N: usize>(
        &self,
        fields: &Fields<N>,
        address: u64,
        size: Literal,
    ) -> Result<u64> {
        let bytes = self.unsigned(fields, size)?;
        if address.checked_add(bytes).is_none() {
            let what = format!("{bytes} bytes, which end behind the last address");
            return Err(shape(fields.at.key(size), what));
        }
        Ok(bytes)
    }

    pub(super) fn signed<const N: usize>(&self, fields: &Fields<N>, key: Literal) -> Result<i64> {
        match fields.need(key)? {
            Item::Int(n) => Ok(n),
            _ => Err(self.wrong(fields, key, "a 64-bit number")),
        }
    }

    /// Absent, `None`, or a pair.
    pub(super) fn pool<const N: usize>(
        &self,
        fields: &Fields<N>,
        key: Literal,
    ) -> Result<Option<PoolId>> {
        let pair = match fields.get(key) {
            None | Some(Item::None) => return Ok(None),
            Some(Item::Tuple(id) | Item::List(id)) => self.tree.list(id),
            Some(_) => &[],
        };
        match pair {
            [Item::Int(a @ 0..), Item::Int(b @ 0..)] => Ok(Some((*a as u64, *b as u64))),
            _ => Err(self.wrong(fields, key, "a pair of numbers")),
        }
    }

    pub(super) fn wrong<const N: usize>(
        &self,
        fields: &Fields<N>,
        key: Literal,
        wanted: &str,
    ) -> ReadError {
        let is = fields.get(key).map_or_else(|| "missing".to_owned(), |i| self.tree.describe(i));
        shape(fields.at.key(key), format!("{is}, not {wanted}"))
    }
}
