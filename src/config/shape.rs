//! What a settings type accepts, learned from its own `Deserialize`: the keys, what each holds, which may be left out.
//!
//! A deserializer that has no data notes what it is asked for and hands out values that fit. So the list of keys is the types
//! themselves; nothing is written down a second time.

use std::fmt;

use serde::Deserialize;
use serde::de::value::{StrDeserializer, StringDeserializer};
use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use toml::Value;

/// What a key may hold.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    Flag,
    /// A whole number within these bounds, both included.
    Whole(i64, i64),
    Number,
    Text,
    /// One of these words.
    Word(&'static [&'static str], TypeName),
    List(Box<Field>),
    /// A table whose keys are free.
    Free(Box<Field>),
    Table(Table),
    /// Whatever TOML can say.
    Anything,
}

/// The path of a Rust type, as `learner::stage::rl::RlSettings`.
pub type TypeName = &'static str;

/// A settings struct.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    pub type_name: TypeName,
    pub fields: Vec<(&'static str, Field)>,
}

/// A key of a table, or what a list holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    pub shape: Shape,
    /// May be absent, and then is off.
    pub optional: bool,
}

impl Field {
    /// # Panics
    /// `T` refuses every value of the kind it asks for: a fault of the program, which its tests find.
    pub fn of<T: for<'de> Deserialize<'de>>() -> Field {
        let mut field = Field::unknown();
        if let Err(error) = T::deserialize(Probe(&mut field)) {
            panic!("{}: {error}", std::any::type_name::<T>());
        }
        field
    }

    fn unknown() -> Field {
        Field { shape: Shape::Anything, optional: false }
    }

    /// The keys, if this is a table.
    pub fn fields(&self) -> &[(&'static str, Field)] {
        match &self.shape {
            Shape::Table(table) => &table.fields,
            _ => &[],
        }
    }

    pub fn field(&self, key: &str) -> Option<&Field> {
        self.fields().iter().find(|(name, _)| *name == key).map(|(_, field)| field)
    }

    /// What people read of it.
    pub fn describe(&self) -> String {
        match &self.shape {
            Shape::Flag => "true or false".into(),
            Shape::Whole(0, i64::MAX) => "whole number".into(),
            Shape::Whole(low, high) => format!("whole number from {low} to {high}"),
            Shape::Number => "number".into(),
            Shape::Text => "text".into(),
            Shape::Word(words, _) => {
                // Second spellings follow the first ones.
                let mut distinct: Vec<&str> = Vec::new();
                distinct.extend(words.iter());
                distinct.dedup_by(|word, before| word.eq_ignore_ascii_case(before));
                distinct.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ")
            }
            Shape::List(of) => match of.shape {
                Shape::Table(_) => "list of tables".into(),
                _ => format!("list of {}", of.describe()),
            },
            Shape::Free(of) if of.shape == Shape::Anything => "table".into(),
            Shape::Free(of) => format!("table with keys of your own, each {}", of.describe()),
            Shape::Table(_) => "table".into(),
            Shape::Anything => "anything".into(),
        }
    }

    /// Whether `value` alone is of this kind; what lists and tables hold is not looked at.
    pub fn holds(&self, value: &Value) -> bool {
        match (&self.shape, value) {
            (Shape::Whole(low, high), Value::Integer(value)) => (low..=high).contains(&value),
            (Shape::Word(words, _), Value::String(value)) => words.contains(&value.as_str()),
            (Shape::Flag, Value::Boolean(_))
            | (Shape::Number, Value::Integer(_) | Value::Float(_))
            | (Shape::Text, Value::String(_))
            | (Shape::List(_), Value::Array(_))
            | (Shape::Free(_) | Shape::Table(_), Value::Table(_))
            | (Shape::Anything, _) => true,
            _ => false,
        }
    }

    /// A value of this kind, tables with all of their keys.
    pub fn sample(&self) -> Value {
        match &self.shape {
            Shape::Flag => Value::Boolean(false),
            Shape::Whole(low, high) => Value::Integer(1.clamp(*low, *high)),
            Shape::Number => Value::Float(1.0),
            Shape::Text | Shape::Anything => Value::String(String::new()),
            Shape::Word(words, _) => Value::String(words.first().copied().unwrap_or_default().into()),
            Shape::List(of) => Value::Array(vec![of.sample()]),
            Shape::Free(_) => Value::Table(toml::Table::new()),
            Shape::Table(table) => {
                Value::Table(table.fields.iter().map(|(name, field)| ((*name).to_owned(), field.sample())).collect())
            }
        }
    }
}

/// A deserializer without data.
struct Probe<'a>(&'a mut Field);

#[derive(Debug)]
struct ProbeError(String);

impl fmt::Display for ProbeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for ProbeError {}

impl de::Error for ProbeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        ProbeError(message.to_string())
    }
}

/// Notes the kind, then hands out a value of it.
macro_rules! plain {
    ($($deserialize:ident $shape:expr => $visit:ident $value:expr;)*) => {$(
        fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ProbeError> {
            self.0.shape = $shape;
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = ProbeError;

    plain! {
        deserialize_any Shape::Anything => visit_bool false;
        deserialize_ignored_any Shape::Anything => visit_bool false;
        deserialize_bool Shape::Flag => visit_bool false;
        deserialize_i8 Shape::Whole(i8::MIN.into(), i8::MAX.into()) => visit_i64 1;
        deserialize_i16 Shape::Whole(i16::MIN.into(), i16::MAX.into()) => visit_i64 1;
        deserialize_i32 Shape::Whole(i32::MIN.into(), i32::MAX.into()) => visit_i64 1;
        deserialize_i64 Shape::Whole(i64::MIN, i64::MAX) => visit_i64 1;
        deserialize_u8 Shape::Whole(0, u8::MAX.into()) => visit_u64 1;
        deserialize_u16 Shape::Whole(0, u16::MAX.into()) => visit_u64 1;
        deserialize_u32 Shape::Whole(0, u32::MAX.into()) => visit_u64 1;
        deserialize_u64 Shape::Whole(0, i64::MAX) => visit_u64 1;
        deserialize_f32 Shape::Number => visit_f64 1.0;
        deserialize_f64 Shape::Number => visit_f64 1.0;
        deserialize_char Shape::Text => visit_char 'x';
        deserialize_str Shape::Text => visit_str "";
        deserialize_string Shape::Text => visit_string String::new();
        deserialize_identifier Shape::Text => visit_str "";
        deserialize_bytes Shape::Text => visit_bytes &[];
        deserialize_byte_buf Shape::Text => visit_bytes &[];
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ProbeError> {
        visitor.visit_unit()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ProbeError> {
        self.0.optional = true;
        visitor.visit_some(self)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, ProbeError> {
        self.deserialize_unit(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, ProbeError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ProbeError> {
        let mut of = Field::unknown();
        let value = visitor.visit_seq(Repeated { of: &mut of, left: 1 });
        self.0.shape = Shape::List(Box::new(of));
        value
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, ProbeError> {
        let mut of = Field::unknown();
        let value = visitor.visit_seq(Repeated { of: &mut of, left: length });
        self.0.shape = Shape::List(Box::new(of));
        value
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, ProbeError> {
        self.deserialize_tuple(length, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ProbeError> {
        let mut of = Field::unknown();
        let value = visitor.visit_map(OneEntry { of: &mut of, given: false });
        self.0.shape = Shape::Free(Box::new(of));
        value
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ProbeError> {
        let type_name = std::any::type_name::<V::Value>();
        let mut fields: Vec<_> = names.iter().map(|name| (*name, Field::unknown())).collect();
        let value = visitor.visit_map(EachField { fields: fields.iter_mut(), current: None });
        self.0.shape = Shape::Table(Table { type_name, fields });
        value
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ProbeError> {
        self.0.shape = Shape::Word(words, std::any::type_name::<V::Value>());
        let first: StrDeserializer<'_, ProbeError> = words.first().copied().unwrap_or_default().into_deserializer();
        visitor.visit_enum(first)
    }
}

/// A list of `left` more elements.
struct Repeated<'a> {
    of: &'a mut Field,
    left: usize,
}

impl<'de> SeqAccess<'de> for Repeated<'_> {
    type Error = ProbeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ProbeError> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(Probe(self.of)).map(Some)
    }
}

/// A table with one key.
struct OneEntry<'a> {
    of: &'a mut Field,
    given: bool,
}

impl<'de> MapAccess<'de> for OneEntry<'_> {
    type Error = ProbeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ProbeError> {
        if std::mem::replace(&mut self.given, true) {
            return Ok(None);
        }
        let key: StringDeserializer<ProbeError> = "key".to_owned().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ProbeError> {
        seed.deserialize(Probe(self.of))
    }
}

/// A struct with every field.
struct EachField<'a> {
    fields: std::slice::IterMut<'a, (&'static str, Field)>,
    current: Option<&'a mut Field>,
}

impl<'de> MapAccess<'de> for EachField<'_> {
    type Error = ProbeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ProbeError> {
        let Some((name, field)) = self.fields.next() else { return Ok(None) };
        self.current = Some(field);
        let key: StrDeserializer<'_, ProbeError> = (*name).into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ProbeError> {
        let field = self.current.take().ok_or_else(|| de::Error::custom("a value was asked for before its key"))?;
        seed.deserialize(Probe(field))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    #[allow(dead_code)]
    struct Inner {
        free_turns: u64,
        weight: f32,
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[allow(dead_code)]
    enum Choice {
        TokenMean,
        Off,
    }

    #[derive(Deserialize)]
    #[allow(dead_code)]
    struct Outer {
        on: bool,
        port: u16,
        choice: Choice,
        #[serde(rename = "maybe")]
        optional: Option<Inner>,
        words: Vec<String>,
        free: Option<toml::Table>,
        environment: std::collections::BTreeMap<String, String>,
    }

    #[test]
    fn the_shape_is_the_types() {
        let field = Field::of::<Outer>();
        let names: Vec<&str> = field.fields().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["on", "port", "choice", "maybe", "words", "free", "environment"]);
        let described: Vec<String> = field.fields().iter().map(|(_, field)| field.describe()).collect();
        assert_eq!(described[..4], ["true or false", "whole number from 0 to 65535", "\"token_mean\" or \"off\"", "table"]);
        assert_eq!(described[4..6], ["list of text", "table"]);
        assert_eq!(described[6], "table with keys of your own, each text");
        let maybe = field.field("maybe").unwrap();
        assert!(maybe.optional && !field.field("port").unwrap().optional);
        assert_eq!(maybe.field("weight").unwrap().shape, Shape::Number);
        let Shape::Table(inner) = &maybe.shape else { panic!() };
        assert!(inner.type_name.starts_with("learner::config::shape::") && inner.type_name.ends_with("::Inner"));
        assert!(field.sample().try_into::<Outer>().is_ok());
    }

    #[test]
    fn values_are_held_to_their_kind() {
        let field = Field::of::<Outer>();
        let holds = |key: &str, value: Value| field.field(key).unwrap().holds(&value);
        assert!(holds("port", Value::Integer(65_535)) && !holds("port", Value::Integer(65_536)));
        assert!(!holds("port", Value::Integer(-1)) && !holds("port", Value::Float(1.0)));
        assert!(holds("choice", Value::String("off".into())) && !holds("choice", Value::String("on".into())));
        assert!(field.field("maybe").unwrap().field("weight").unwrap().holds(&Value::Integer(1)));
    }
}
