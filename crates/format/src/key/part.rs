//! What a part of the key can be, how it is read, and what becomes of the rest.
//!
//! A record takes from a file what it understands. A key without a field, and a value that is not
//! of its field's type, stay as they are in [`Kept`], with the order of the file. So a file that is
//! read and written again loses nothing, and one value of the wrong type takes no other with it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// Something that is under the key.
pub trait Part: Serialize + Default {
    /// Its type in words, for the documentation.
    const TYPE: &'static str;
    /// It may be null.
    const MAY_BE_NULL: bool = false;

    /// Can this be read as such a part?
    fn fits(value: &Value) -> bool;

    /// Reads what fits.
    fn take(value: Value) -> Self;

    /// Bytes of memory that reading this takes, beside what the value has
    /// taken and the part itself.
    fn cost(_value: &Value) -> usize {
        0
    }

    /// Is it more than nothing?
    fn is_set(&self) -> bool;

    /// Is it written by whoever makes it? All is but [`None`].
    fn is_written(&self) -> bool {
        true
    }

    /// Names what the file has and this doesn't understand.
    fn unknown(&self, _at: &str, _names: &mut Vec<String>) {}

    /// No number is so large afterwards that PyTorch's viewer couldn't read
    /// it: a damaged file may say anything.
    fn bound(&mut self) {}

    /// The rows of the documentation.
    fn describe(_at: &str, _rows: &mut Vec<Row>) {}
}

/// A key in the documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where it is: `owners.devices[].held`.
    pub key: String,
    /// Its type in words.
    pub kind: String,
    /// What it means.
    pub meaning: String,
}

impl Part for u64 {
    const TYPE: &'static str = "number";

    fn fits(value: &Value) -> bool {
        value.is_u64()
    }

    fn take(value: Value) -> u64 {
        value.as_u64().unwrap_or_default()
    }

    fn is_set(&self) -> bool {
        *self != 0
    }

    fn bound(&mut self) {
        *self = (*self).min(i64::MAX as u64);
    }
}

impl Part for i64 {
    const TYPE: &'static str = "number";

    fn fits(value: &Value) -> bool {
        value.is_i64()
    }

    fn take(value: Value) -> i64 {
        value.as_i64().unwrap_or_default()
    }

    fn is_set(&self) -> bool {
        *self != 0
    }
}

impl Part for bool {
    const TYPE: &'static str = "true or false";

    fn fits(value: &Value) -> bool {
        value.is_boolean()
    }

    fn take(value: Value) -> bool {
        value == Value::Bool(true)
    }

    fn is_set(&self) -> bool {
        *self
    }
}

impl Part for String {
    const TYPE: &'static str = "string";

    fn fits(value: &Value) -> bool {
        value.is_string()
    }

    fn take(value: Value) -> String {
        match value {
            Value::String(text) => text,
            _ => String::new(),
        }
    }

    fn is_set(&self) -> bool {
        !self.is_empty()
    }
}

/// Where something is, and when: a pair of numbers.
impl Part for (i64, u64) {
    const TYPE: &'static str = "pair";

    fn fits(value: &Value) -> bool {
        value.as_array().is_some_and(|p| p.len() == 2 && p[0].is_i64() && p[1].is_u64())
    }

    fn take(value: Value) -> (i64, u64) {
        (value[0].as_i64().unwrap_or_default(), value[1].as_u64().unwrap_or_default())
    }

    fn is_set(&self) -> bool {
        true
    }

    fn bound(&mut self) {
        self.1.bound();
    }
}

/// Names with a text for each.
impl Part for BTreeMap<String, String> {
    const TYPE: &'static str = "object";

    fn fits(value: &Value) -> bool {
        value.as_object().is_some_and(|map| map.values().all(Value::is_string))
    }

    fn take(value: Value) -> BTreeMap<String, String> {
        match value {
            Value::Object(map) => map.into_iter().map(|(k, v)| (k, String::take(v))).collect(),
            _ => BTreeMap::new(),
        }
    }

    fn cost(value: &Value) -> usize {
        value.as_object().map_or(0, |map| map.len() * 2 * size_of::<(String, String)>())
    }

    fn is_set(&self) -> bool {
        !self.is_empty()
    }
}

/// May be absent.
impl<T: Part> Part for Option<T> {
    const TYPE: &'static str = T::TYPE;
    const MAY_BE_NULL: bool = T::MAY_BE_NULL;

    fn fits(value: &Value) -> bool {
        T::fits(value)
    }

    fn take(value: Value) -> Option<T> {
        Some(T::take(value))
    }

    fn cost(value: &Value) -> usize {
        T::cost(value)
    }

    fn is_set(&self) -> bool {
        self.is_some()
    }

    fn is_written(&self) -> bool {
        self.is_some()
    }

    fn unknown(&self, at: &str, names: &mut Vec<String>) {
        if let Some(part) = self {
            part.unknown(at, names);
        }
    }

    fn bound(&mut self) {
        if let Some(part) = self {
            part.bound();
        }
    }

    fn describe(at: &str, rows: &mut Vec<Row>) {
        T::describe(at, rows);
    }
}

/// A value, or `null` for what is not known, which is more than not being there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrNull<T>(pub Option<T>);

impl<T: Serialize> Serialize for OrNull<T> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<T: Part> Part for OrNull<T> {
    const TYPE: &'static str = T::TYPE;
    const MAY_BE_NULL: bool = true;

    fn fits(value: &Value) -> bool {
        value.is_null() || T::fits(value)
    }

    fn take(value: Value) -> OrNull<T> {
        OrNull((!value.is_null()).then(|| T::take(value)))
    }

    fn cost(value: &Value) -> usize {
        T::cost(value)
    }

    fn is_set(&self) -> bool {
        true
    }

    fn unknown(&self, at: &str, names: &mut Vec<String>) {
        self.0.unknown(at, names);
    }

    fn bound(&mut self) {
        self.0.bound();
    }

    fn describe(at: &str, rows: &mut Vec<Row>) {
        T::describe(at, rows);
    }
}

impl<T: Part> Part for Vec<T> {
    const TYPE: &'static str = "list";

    fn fits(value: &Value) -> bool {
        value.as_array().is_some_and(|list| list.iter().all(T::fits))
    }

    fn take(value: Value) -> Vec<T> {
        match value {
            Value::Array(list) => list.into_iter().map(T::take).collect(),
            _ => Vec::new(),
        }
    }

    fn cost(value: &Value) -> usize {
        let list = value.as_array().into_iter().flatten();
        list.map(|part| size_of::<T>().saturating_add(T::cost(part))).fold(0, usize::saturating_add)
    }

    fn is_set(&self) -> bool {
        !self.is_empty()
    }

    fn unknown(&self, at: &str, names: &mut Vec<String>) {
        for part in self {
            part.unknown(&format!("{at}[]"), names);
        }
    }

    fn bound(&mut self) {
        self.iter_mut().for_each(Part::bound);
    }

    fn describe(at: &str, rows: &mut Vec<Row>) {
        T::describe(&format!("{at}[]"), rows);
    }
}

/// Reads a field. What it doesn't understand comes back.
pub(super) fn read<T: Part>(field: &mut T, value: Value, may_be_null: bool) -> Option<Value> {
    if may_be_null && value.is_null() {
        return None;
    }
    if !T::fits(&value) {
        return Some(value);
    }
    *field = T::take(value);
    None
}

/// A key of a file, and its value unless it is understood.
pub(super) type Key = (Cow<'static, str>, Option<Value>);

/// What a file says in a record beside what is understood, and the order in which it says it. Empty
/// for a record that is made here, and for one that is written in the same way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    /// The record is a file's: what that doesn't say is not written.
    is_read: bool,
    /// All keys of the file. Those that are understood have no value here.
    keys: Vec<Key>,
}

/// What a field is like when its record is written.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) name: &'static str,
    pub(super) is_set: bool,
    pub(super) is_written: bool,
}

/// What comes next in a record.
pub(super) enum Next<'a> {
    Field(&'static str),
    Other(&'a str, &'a Value),
}

impl Kept {
    /// Nothing: for a record that is made here.
    pub const NOTHING: Kept = Kept { is_read: false, keys: Vec::new() };

    /// The same for one in which only that is written which is set.
    pub const ONLY_WHAT_IS_SET: Kept = Kept { is_read: true, keys: Vec::new() };

    pub(super) fn of(keys: Vec<Key>, fields: impl Iterator<Item = State>) -> Kept {
        let written = fields.filter(|f| f.is_written).map(|f| Some(f.name));
        let there = keys.iter().map(|(key, value)| value.is_none().then_some(&**key));
        if there.eq(written) { Kept::NOTHING } else { Kept { is_read: true, keys } }
    }

    /// As if the record had been made here: its own keys in their order,
    /// and all of them; then the others.
    pub(super) fn forget_order(&mut self) {
        self.is_read = false;
        self.keys.retain(|(_, value)| value.is_some());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty() && !self.is_read
    }

    pub(super) fn bound(&mut self) {
        self.keys.iter_mut().filter_map(|(_, value)| value.as_mut()).for_each(bound);
    }

    /// Keys that have no field, or not the type of their field.
    pub(super) fn unknown<'a>(
        &'a self,
        fields: impl Iterator<Item = State> + Clone + 'a,
    ) -> impl Iterator<Item = &'a str> {
        let is_field = move |key: &str| fields.clone().any(|f| f.name == key);
        self.keys.iter().filter_map(move |(key, value)| {
            let value = value.as_ref()?;
            (!value.is_null() || !is_field(key)).then_some(&**key)
        })
    }

    /// The record's keys in the order in which they are written.
    pub(super) fn order(&self, fields: &(impl Iterator<Item = State> + Clone)) -> Vec<Next<'_>> {
        let of = |key: &str| fields.clone().find(|f| f.name == key);
        let is_here = |key: &str| self.keys.iter().any(|(other, _)| other == key);
        let as_read = self.keys.iter().filter_map(|(key, value)| match (of(key), value) {
            // What was set since takes the place of what nobody understood.
            (Some(field), Some(_)) if field.is_set => Some(Next::Field(field.name)),
            (Some(field), None) => field.is_written.then_some(Next::Field(field.name)),
            (_, value) => value.as_ref().map(|value| Next::Other(key, value)),
        });
        let others = fields.clone().filter(|f| !is_here(f.name));
        if self.is_read {
            let set = others.filter(|f| f.is_set);
            as_read.chain(set.map(|f| Next::Field(f.name))).collect()
        } else {
            let made = others.filter(|f| f.is_written);
            made.map(|f| Next::Field(f.name)).chain(as_read).collect()
        }
    }
}

/// Integers of a snapshot are below 2^63.
fn bound(value: &mut Value) {
    match value {
        Value::Number(n) if n.is_u64() && !n.is_i64() => *value = i64::MAX.into(),
        Value::Array(list) => list.iter_mut().for_each(bound),
        Value::Object(map) => map.values_mut().for_each(bound),
        _ => {}
    }
}
