//! The macro that makes records: a struct with a documented field for each
//! key, which reads and writes itself.

/// Declares records. A field's key is its name, or the text behind `=`; behind `[null]` it is
/// written as `null` where nothing is known.
macro_rules! records {
    ($(
        $(#[doc = $about:literal])*
        $record:ident {
            $( $(#[doc = $doc:literal])* $field:ident $(= $name:literal)? : $type:ty $([$null:ident])?, )*
        }
    )*) => { $(
        $(#[doc = $about])*
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $record {
            $( $(#[doc = $doc])* pub $field: $type, )*
            /// What else a file says there.
            pub kept: crate::key::Kept,
        }

        impl $record {
            /// A record that was made here, with the keys of another one where it has none.
            #[must_use]
            pub fn or(self, other: $record) -> $record {
                $record {
                    $( $field: if crate::key::Part::is_written(&self.$field) {
                        self.$field
                    } else {
                        other.$field
                    }, )*
                    kept: other.kept,
                }
            }

            fn states(&self) -> impl Iterator<Item = crate::key::part::State> + Clone + use<> {
                use crate::key::part::{Part, State};
                [$( State {
                    name: records!(@name $field $($name)?),
                    is_set: Part::is_set(&self.$field),
                    is_written: records!(@null $($null)?) || Part::is_written(&self.$field),
                }, )*].into_iter()
            }
        }

        impl crate::key::Part for $record {
            const TYPE: &'static str = "object";

            fn fits(value: &serde_json::Value) -> bool {
                value.is_object()
            }

            fn take(value: serde_json::Value) -> $record {
                let mut new = $record::default();
                let serde_json::Value::Object(map) = value else { return new };
                let mut keys = Vec::with_capacity(map.len());
                for (key, value) in map {
                    $( if key == records!(@name $field $($name)?) {
                        let null = records!(@null $($null)?);
                        let rest = crate::key::part::read(&mut new.$field, value, null);
                        keys.push((records!(@name $field $($name)?).into(), rest));
                        continue;
                    } )*
                    keys.push((key.into(), Some(value)));
                }
                new.kept = crate::key::Kept::of(keys, new.states());
                new
            }

            fn cost(value: &serde_json::Value) -> usize {
                let Some(map) = value.as_object() else { return 0 };
                let of_fields = [$( map
                    .get(records!(@name $field $($name)?))
                    .map_or(0, <$type as crate::key::Part>::cost) ),*];
                let keys = map.len() * size_of::<crate::key::part::Key>();
                of_fields.into_iter().fold(keys, usize::saturating_add)
            }

            fn is_set(&self) -> bool {
                !self.kept.is_empty() || self.states().any(|field| field.is_set)
            }

            fn unknown(&self, at: &str, names: &mut Vec<String>) {
                let inside = |key: &str| crate::key::inside(at, key);
                names.extend(self.kept.unknown(self.states()).map(inside));
                $( self.$field.unknown(&inside(records!(@name $field $($name)?)), names); )*
            }

            fn bound(&mut self) {
                $( self.$field.bound(); )*
                self.kept.bound();
            }

            fn describe(at: &str, rows: &mut Vec<crate::key::Row>) {
                $( {
                    let key = crate::key::inside(at, records!(@name $field $($name)?));
                    let may_be_null = records!(@null $($null)?)
                        || <$type as crate::key::Part>::MAY_BE_NULL;
                    let null = if may_be_null { " or null" } else { "" };
                    let kind = format!("{}{null}", <$type as crate::key::Part>::TYPE);
                    let meaning = [$( $doc ),*].map(str::trim).join(" ");
                    rows.push(crate::key::Row { key: key.clone(), kind, meaning });
                    <$type as crate::key::Part>::describe(&key, rows);
                } )*
            }
        }

        impl serde::Serialize for $record {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeMap;
                let mut map = to.serialize_map(None)?;
                if self.kept.is_empty() {
                    $( if records!(@null $($null)?) || crate::key::Part::is_written(&self.$field) {
                        map.serialize_entry(records!(@name $field $($name)?), &self.$field)?;
                    } )*
                    return map.end();
                }
                for next in self.kept.order(&self.states()) {
                    match next {
                        $( crate::key::part::Next::Field(name)
                            if name == records!(@name $field $($name)?) =>
                        {
                            map.serialize_entry(name, &self.$field)?;
                        } )*
                        crate::key::part::Next::Field(_) => {}
                        crate::key::part::Next::Other(key, value) => map.serialize_entry(key, value)?,
                    }
                }
                map.end()
            }
        }
    )* };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    (@null) => { false };
    (@null null) => { true };
}
