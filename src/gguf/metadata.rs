//! Typed metadata: the values of a file's header by key, and getters that check type and range.
//!
//! Integers are stored as the file has them and converted when read: converters disagree about widths, so a getter of a count takes
//! any integer type whose value fits. A key that is there with a wrong type is an error even from an optional getter.

use std::collections::BTreeMap;
use std::fmt;

use super::error::{GgufError, shown};

/// The thirteen value types, with the numbers GGUF gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of the GGUF format")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this GGUF number.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|value_type| *value_type as u32 == id)
    }
}

/// The elements of an array value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of the GGUF format")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
}

/// Runs `$body` with `$items` bound to the vector of any integer array, else `$other`.
macro_rules! with_integers {
    ($array:expr, $items:ident => $body:expr, $other:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::String(_) => $other,
        }
    };
}

impl Array {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(items) => items.len(),
            Self::F64(items) => items.len(),
            Self::Bool(items) => items.len(),
            Self::String(items) => items.len(),
            integers => with_integers!(integers, items => items.len(), 0),
        }
    }

    /// True where there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
        }
    }
}

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of the GGUF format")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

impl Value {
    /// An integer of any width, or `None` for other types.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }
}

/// The value's type and, where short, the value: what an error about a wrong type says was found.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32(value) => write!(f, "the f32 {value}"),
            Self::F64(value) => write!(f, "the f64 {value}"),
            Self::Bool(value) => write!(f, "the bool {value}"),
            Self::String(value) => write!(f, "the string {:?}", shown(value)),
            Self::Array(array) => write!(f, "an array of {} {}", array.len(), array.type_name()),
            integer => write!(f, "the integer {}", integer.integer().unwrap_or_default()),
        }
    }
}

/// Why a value cannot be read as some type; the getter adds file and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Another type.
    Type,
    /// A number out of range, and its place where the value is an array.
    Range {
        /// The number.
        found: i128,
        /// Place in the array.
        index: Option<usize>,
    },
}

/// A type that metadata values can be read as.
pub trait FromValue<'a>: Sized {
    /// The type in words, as errors name what is wanted.
    const WANTED: &'static str;

    /// Reads the value.
    ///
    /// # Errors
    /// [`Unfit`] where the type or the range does not fit.
    fn from_value(value: &'a Value) -> Result<Self, Unfit>;
}

/// Implements [`FromValue`] for an integer type and for arrays of it.
macro_rules! from_integers {
    ($($integer:ty: $wanted:literal, $wanted_array:literal;)*) => {$(
        impl FromValue<'_> for $integer {
            const WANTED: &'static str = $wanted;
            fn from_value(value: &Value) -> Result<Self, Unfit> {
                let found = value.integer().ok_or(Unfit::Type)?;
                Self::try_from(found).map_err(|_| Unfit::Range { found, index: None })
            }
        }

        impl FromValue<'_> for Vec<$integer> {
            const WANTED: &'static str = $wanted_array;
            fn from_value(value: &Value) -> Result<Self, Unfit> {
                let Value::Array(array) = value else { return Err(Unfit::Type) };
                let narrow = |(index, found)| <$integer>::try_from(found).map_err(|_| Unfit::Range { found, index: Some(index) });
                with_integers!(
                    array,
                    items => items.iter().map(|&item| i128::from(item)).enumerate().map(narrow).collect(),
                    Err(Unfit::Type)
                )
            }
        }
    )*};
}

from_integers! {
    u32: "an integer from 0 to 2^32-1", "an array of integers from 0 to 2^32-1";
    u64: "an integer from 0 to 2^64-1", "an array of integers from 0 to 2^64-1";
    i32: "an integer from -2^31 to 2^31-1", "an array of integers from -2^31 to 2^31-1";
}

#[allow(clippy::cast_possible_truncation, reason = "a double that stands for a setting loses no more than its last digits")]
fn narrow_float(value: f64) -> f32 {
    value as f32
}

impl FromValue<'_> for f32 {
    const WANTED: &'static str = "a floating-point number";
    fn from_value(value: &Value) -> Result<Self, Unfit> {
        match *value {
            Value::F32(value) => Ok(value),
            Value::F64(value) => Ok(narrow_float(value)),
            _ => Err(Unfit::Type),
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const WANTED: &'static str = "an array of floating-point numbers";
    fn from_value(value: &Value) -> Result<Self, Unfit> {
        match value {
            Value::Array(Array::F32(items)) => Ok(items.clone()),
            Value::Array(Array::F64(items)) => Ok(items.iter().copied().map(narrow_float).collect()),
            _ => Err(Unfit::Type),
        }
    }
}

impl FromValue<'_> for bool {
    const WANTED: &'static str = "a bool";
    fn from_value(value: &Value) -> Result<Self, Unfit> {
        if let Value::Bool(value) = *value { Ok(value) } else { Err(Unfit::Type) }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const WANTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Result<Self, Unfit> {
        if let Value::String(value) = value { Ok(value) } else { Err(Unfit::Type) }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const WANTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Result<Self, Unfit> {
        if let Value::Array(Array::String(items)) = value { Ok(items) } else { Err(Unfit::Type) }
    }
}

impl<'a> FromValue<'a> for &'a [bool] {
    const WANTED: &'static str = "an array of bools";
    fn from_value(value: &'a Value) -> Result<Self, Unfit> {
        if let Value::Array(Array::Bool(items)) = value { Ok(items) } else { Err(Unfit::Type) }
    }
}

/// A setting that a file gives once for all layers, or once for each.
///
/// One number is not spread out: the count of layers comes from the file too, and must not decide how much is allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerLayer {
    /// One number for all of `n_layer` layers.
    Same {
        /// The number.
        value: u32,
        /// How many layers it stands for.
        n_layer: u32,
    },
    /// One number for each layer, from the input on.
    Each(Vec<u32>),
}

impl PerLayer {
    /// The number of one layer, `None` from the last layer on.
    #[must_use]
    pub fn get(&self, layer: u32) -> Option<u32> {
        match self {
            Self::Same { value, n_layer } => (layer < *n_layer).then_some(*value),
            Self::Each(values) => values.get(layer as usize).copied(),
        }
    }

    /// The one number of all layers, or `None` where they differ or there is no layer.
    #[must_use]
    pub fn uniform(&self) -> Option<u32> {
        match self {
            Self::Same { value, n_layer } => (*n_layer > 0).then_some(*value),
            Self::Each(values) => values.first().copied().filter(|first| values.iter().all(|value| value == first)),
        }
    }

    /// The largest number, or `None` where there is no layer.
    #[must_use]
    pub fn max(&self) -> Option<u32> {
        match self {
            Self::Same { .. } => self.uniform(),
            Self::Each(values) => values.iter().copied().max(),
        }
    }
}

/// The key-value pairs of a file (of the first file of a split set), sorted by key.
#[derive(Clone, Debug, PartialEq)]
pub struct Metadata {
    file: String,
    values: BTreeMap<String, Value>,
}

/// Declares a required and an optional getter of one type.
macro_rules! getters {
    ($($required:ident, $optional:ident: $type:ty, $what:literal;)*) => {$(
        #[doc = concat!("The value of `key` as ", $what, ".")]
        ///
        /// # Errors
        /// Where the key is missing, has another type or does not fit.
        pub fn $required(&self, key: &str) -> Result<$type, GgufError> {
            self.required(key)
        }

        #[doc = concat!("The value of `key` as ", $what, ", or `None` where the key is absent.")]
        ///
        /// # Errors
        /// Where the key is there but has another type or does not fit.
        pub fn $optional(&self, key: &str) -> Result<Option<$type>, GgufError> {
            self.optional(key)
        }
    )*};
}

impl Metadata {
    /// Metadata with these values; `file` is what errors call their source.
    #[must_use]
    pub fn new(file: impl Into<String>, values: BTreeMap<String, Value>) -> Self {
        Self { file: file.into(), values }
    }

    /// What errors call the file these values are from.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// True where there are no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// True where the key is there, whatever its type.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The value as the file has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// All pairs, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    getters! {
        u32, u32_opt: u32, "a number that any integer type may hold";
        u64, u64_opt: u64, "a number that any integer type may hold";
        i32, i32_opt: i32, "a number that any integer type may hold";
        f32, f32_opt: f32, "a floating-point number";
        bool, bool_opt: bool, "a truth value";
        string, string_opt: &str, "a string";
        string_array, string_array_opt: &[String], "strings";
        u32_array, u32_array_opt: Vec<u32>, "numbers that any integer type may hold";
        u64_array, u64_array_opt: Vec<u64>, "numbers that any integer type may hold";
        i32_array, i32_array_opt: Vec<i32>, "numbers that any integer type may hold";
        f32_array, f32_array_opt: Vec<f32>, "floating-point numbers";
    }

    /// The value of `key` as `T`; the named getters are shorthands of this.
    ///
    /// # Errors
    /// Where the key is missing, has another type or does not fit.
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        let missing = || GgufError::MissingKey { file: self.file.clone(), key: key.to_owned(), wanted: T::WANTED };
        self.optional(key)?.ok_or_else(missing)
    }

    /// The value of `key` as `T`, or `None` where the key is absent.
    ///
    /// # Errors
    /// Where the key is there but has another type or does not fit.
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).map_err(|unfit| self.unfit(key, value, unfit, T::WANTED))
    }

    /// A key that is a number for all layers or an array with one number a layer.
    ///
    /// # Errors
    /// Where the key is missing, is neither, does not fit, or is an array of another length than `n_layer`.
    pub fn per_layer_u32(&self, key: &str, n_layer: u32) -> Result<PerLayer, GgufError> {
        let wanted = "an integer from 0 to 2^32-1, or an array of one a layer,";
        let missing = || GgufError::MissingKey { file: self.file.clone(), key: key.to_owned(), wanted };
        self.per_layer_u32_opt(key, n_layer)?.ok_or_else(missing)
    }

    /// As [`per_layer_u32`](Self::per_layer_u32), with `None` where the key is absent.
    ///
    /// # Errors
    /// Where the key is there but is neither, does not fit, or is an array of another length than `n_layer`.
    pub fn per_layer_u32_opt(&self, key: &str, n_layer: u32) -> Result<Option<PerLayer>, GgufError> {
        if !matches!(self.values.get(key), Some(Value::Array(_))) {
            return Ok(self.u32_opt(key)?.map(|value| PerLayer::Same { value, n_layer }));
        }
        let values = self.u32_array(key)?;
        if values.len() as u64 == u64::from(n_layer) {
            Ok(Some(PerLayer::Each(values)))
        } else {
            Err(GgufError::LayerCount { file: self.file.clone(), key: key.to_owned(), found: values.len(), n_layer })
        }
    }

    fn unfit(&self, key: &str, value: &Value, unfit: Unfit, wanted: &'static str) -> GgufError {
        let (file, key) = (self.file.clone(), shown(key));
        match unfit {
            Unfit::Type => GgufError::WrongType { file, key, found: value.to_string(), wanted },
            Unfit::Range { found, index } => GgufError::OutOfRange { file, key, index, found, wanted },
        }
    }
}
