//! Whatever can be serialized, into an encoding as it comes: nothing of it is built in between.

use std::fmt::Display;
use std::io;

use serde::ser::{
    self, Error as _, Impossible, Serialize, SerializeMap, SerializeSeq, SerializeTuple,
};

use super::{Encoder, invalid, signed, too_large};

/// How deep a value of a snapshot may nest; PyTorch's own reach two levels.
const MAX_DEPTH: u32 = 64;

/// Writes a value: what JSON has.
pub(super) fn write<E: Encoder>(value: &impl Serialize, out: &mut E) -> io::Result<()> {
    value.serialize(To { out, depth: 0, is_key: false }).map_err(|Error(error)| error)
}

/// Where the value goes, and how deep it is.
struct To<'e, E> {
    out: &'e mut E,
    depth: u32,
    /// It is a key, not a value.
    is_key: bool,
}

/// An error of the file's.
#[derive(Debug)]
struct Error(io::Error);

impl std::error::Error for Error {}

impl Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl ser::Error for Error {
    fn custom<T: Display>(what: T) -> Error {
        Error(invalid(what.to_string()))
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error(error)
    }
}

type Result<T> = std::result::Result<T, Error>;

/// What no value of ours is.
fn no<T>(what: &str) -> Result<T> {
    Err(Error::custom(format!("a snapshot has no {what}")))
}

impl<E: Encoder> To<'_, E> {
    /// One level further in.
    fn inside(&mut self) -> Result<To<'_, E>> {
        if self.depth >= MAX_DEPTH {
            let what = format!("a value nests deeper than {MAX_DEPTH} levels");
            return Err(Error(invalid(what)));
        }
        Ok(To { out: self.out, depth: self.depth + 1, is_key: false })
    }
}

impl<'e, E: Encoder> ser::Serializer for To<'e, E> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = To<'e, E>;
    type SerializeTuple = To<'e, E>;
    type SerializeTupleStruct = Impossible<(), Error>;
    type SerializeTupleVariant = Impossible<(), Error>;
    type SerializeMap = To<'e, E>;
    type SerializeStruct = Impossible<(), Error>;
    type SerializeStructVariant = Impossible<(), Error>;

    fn serialize_bool(self, b: bool) -> Result<()> {
        Ok(self.out.bool(b)?)
    }

    fn serialize_i8(self, n: i8) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_i16(self, n: i16) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_i32(self, n: i32) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_i64(self, n: i64) -> Result<()> {
        Ok(self.out.int(n)?)
    }

    fn serialize_u8(self, n: u8) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_u16(self, n: u16) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_u32(self, n: u32) -> Result<()> {
        self.serialize_i64(n.into())
    }

    fn serialize_u64(self, n: u64) -> Result<()> {
        self.serialize_i64(signed(n).ok_or_else(|| too_large("a value", n))?)
    }

    fn serialize_f32(self, x: f32) -> Result<()> {
        self.serialize_f64(x.into())
    }

    fn serialize_f64(self, x: f64) -> Result<()> {
        Ok(self.out.float(x)?)
    }

    fn serialize_char(self, c: char) -> Result<()> {
        self.serialize_str(c.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, text: &str) -> Result<()> {
        let done = if self.is_key { self.out.other_key(text) } else { self.out.text(text) };
        Ok(done?)
    }

    fn serialize_bytes(self, _: &[u8]) -> Result<()> {
        no("bytes")
    }

    fn serialize_none(self) -> Result<()> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<()> {
        Ok(self.out.null()?)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<()> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, name: &'static str) -> Result<()> {
        self.serialize_str(name)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<()> {
        no("variants with a value")
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<To<'e, E>> {
        self.out.begin_list()?;
        Ok(self)
    }

    fn serialize_tuple(self, length: usize) -> Result<To<'e, E>> {
        self.serialize_seq(Some(length))
    }

    fn serialize_tuple_struct(
        self,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleStruct> {
        no("tuples with a name")
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant> {
        no("variants with a value")
    }

    fn serialize_map(self, _: Option<usize>) -> Result<To<'e, E>> {
        self.out.begin_dict()?;
        Ok(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self::SerializeStruct> {
        no("structs")
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant> {
        no("variants with a value")
    }
}

impl<E: Encoder> SerializeSeq for To<'_, E> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.out.item()?;
        value.serialize(self.inside()?)
    }

    fn end(self) -> Result<()> {
        Ok(self.out.end_list()?)
    }
}

impl<E: Encoder> SerializeTuple for To<'_, E> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        SerializeSeq::serialize_element(self, value)
    }

    fn end(self) -> Result<()> {
        SerializeSeq::end(self)
    }
}

impl<E: Encoder> SerializeMap for To<'_, E> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<()> {
        key.serialize(To { out: &mut *self.out, depth: self.depth, is_key: true })
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        value.serialize(self.inside()?)
    }

    fn end(self) -> Result<()> {
        Ok(self.out.end_dict()?)
    }
}
