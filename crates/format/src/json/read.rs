//! The reader of JSON snapshots, into the same tree as a pickle.
//!
//! `serde_json` parses; nothing is kept of the text but the tree. Its
//! limit on nesting (128) is ours.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};

use crate::error::ReadError;
use crate::tree::{Item, OverBudget, TOO_LARGE, Tree};

/// Reads a JSON text.
///
/// # Errors
/// [`ReadError::Json`] with line and column.
pub fn read(bytes: &[u8]) -> Result<Tree<'_>, ReadError> {
    let mut tree = Tree::new(bytes.len(), usize::MAX);
    let mut text = serde_json::Deserializer::from_slice(bytes);
    let root = Builder(&mut tree).deserialize(&mut text);
    tree.root = root.and_then(|root| text.end().map(|()| root)).map_err(|e| error(&e))?;
    Ok(tree)
}

/// Reads one JSON text after the other, in so many bytes of memory. The texts are the elements of a
/// list if there are several. With the tree comes what is wrong behind them.
pub(crate) fn read_within(
    bytes: &[u8],
    memory: usize,
) -> Result<(Tree<'_>, Option<ReadError>), ReadError> {
    let mut tree = Tree::new(bytes.len(), memory);
    let mut text = serde_json::Deserializer::from_slice(bytes);
    let mut roots = vec![Builder(&mut tree).deserialize(&mut text).map_err(|e| error(&e))?];
    let mut rest = None;
    while let Err(trailing) = text.end() {
        match Builder(&mut tree).deserialize(&mut text) {
            Ok(root) => roots.push(root),
            Err(e) => {
                // Of what begins no value there is nothing better to say than that it follows.
                let begins = (e.line(), e.column()) != (trailing.line(), trailing.column());
                rest = Some(error(if begins { &e } else { &trailing }));
                break;
            }
        }
    }
    tree.root = match roots[..] {
        [root] => root,
        _ => Item::List(tree.add_list(roots).map_err(|_| ReadError::TooLarge)?),
    };
    Ok((tree, rest))
}

fn error(e: &serde_json::Error) -> ReadError {
    let what = e.to_string();
    if what.starts_with(TOO_LARGE) { ReadError::TooLarge } else { ReadError::Json(what) }
}

struct Builder<'t, 'a>(&'t mut Tree<'a>);

fn over_budget<E: Error>(over_budget: OverBudget) -> E {
    E::custom(over_budget.text())
}

impl<'a> DeserializeSeed<'a> for Builder<'_, 'a> {
    type Value = Item;

    fn deserialize<D: serde::Deserializer<'a>>(self, text: D) -> Result<Item, D::Error> {
        text.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Builder<'_, 'a> {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Item, E> {
        Ok(Item::None)
    }

    fn visit_bool<E: Error>(self, b: bool) -> Result<Item, E> {
        Ok(Item::Bool(b))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Item, E> {
        Ok(Item::Int(n))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Item, E> {
        Ok(i64::try_from(n).map_or(Item::Large(n), Item::Int))
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Item, E> {
        Ok(Item::Float(x))
    }

    fn visit_borrowed_str<E: Error>(self, text: &'a str) -> Result<Item, E> {
        let id = self.0.intern(Cow::Borrowed(text)).map_err(over_budget)?;
        Ok(Item::Text(id))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
        let id = self.0.intern(Cow::Owned(text.to_owned())).map_err(over_budget)?;
        Ok(Item::Text(id))
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<Item, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Builder(&mut *self.0))? {
            self.0.spend(1).map_err(over_budget)?;
            items.push(item);
        }
        Ok(Item::List(self.0.add_paid_list(items).map_err(over_budget)?))
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Item, A::Error> {
        let mut pairs = Vec::new();
        while let Some(key) = map.next_key_seed(Builder(&mut *self.0))? {
            pairs.push((key, map.next_value_seed(Builder(&mut *self.0))?));
            self.0.spend(2).map_err(over_budget)?;
        }
        Ok(Item::Dict(self.0.add_paid_dict(pairs).map_err(over_budget)?))
    }
}
