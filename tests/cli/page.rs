//! A small reader of our own pages: it fails on what is not balanced, and knows elements and the texts of cells.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::engine::TempFile;

/// Elements without an end.
const VOID: [&str; 2] = ["meta", "!DOCTYPE"];

/// A page that was read to its end.
pub struct Page {
    counts: BTreeMap<String, usize>,
    cells: BTreeSet<String>,
    source: String,
}

impl Page {
    /// Reads a page; every element must end where it should, and nothing may be loaded from elsewhere.
    pub fn read(file: &TempFile) -> Self {
        let source = std::fs::read_to_string(&file.0).expect("the page was written");
        let mut page = Self { counts: BTreeMap::new(), cells: BTreeSet::new(), source };
        let source = page.source.clone();
        let mut open: Vec<&str> = Vec::new();
        let mut rest = source.as_str();
        while let Some((text, tail)) = rest.split_once('<') {
            assert!(!text.contains('>'), "a stray end of a tag near {text:?}");
            for reference in text.split('&').skip(1).map(|rest| rest.split_once(';').expect("a reference ends").0) {
                assert!(["amp", "lt", "gt", "quot", "#39"].contains(&reference), "&{reference};");
            }
            if open.last() == Some(&"td") {
                page.cells.insert(text.to_owned());
            }
            let (tag, tail) = tail.split_once('>').expect("every tag ends");
            rest = tail;
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "elements end in the order in which they began: {open:?}");
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "quotes of <{tag}>");
            let name = tag.split([' ', '/']).next().expect("a name");
            *page.counts.entry(name.to_owned()).or_default() += 1;
            if !tag.ends_with('/') && !VOID.contains(&name) {
                open.push(name);
            }
        }
        assert!(open.is_empty() && rest.trim().is_empty(), "open at the end: {open:?}, {rest:?}");
        for element in ["script", "link", "img", "iframe", "object", "image", "use"] {
            assert_eq!(page.count(element), 0, "<{element}> is not for a page that needs nothing else");
        }
        for outside in ["http:", "https:", "src=", "url(", "@import"] {
            assert!(!page.source.contains(outside), "{outside} leads out of the page");
        }
        assert!(page.source.contains("prefers-color-scheme: dark") && page.source.contains("width=device-width"));
        page
    }

    /// How many elements of a name there are.
    pub fn count(&self, element: &str) -> usize {
        self.counts.get(element).copied().unwrap_or(0)
    }

    pub fn assert_has_cell(&self, text: &str) {
        assert!(self.cells.contains(text), "no cell {text:?} in {:?}", self.cells);
    }

    /// A number stands at the start of a cell, rounded to what the page shows of it.
    pub fn assert_has_number(&self, number: f64, origin: &serde_json::Value) {
        let digits = match number {
            large if large >= 1000.0 => 0,
            middle if middle >= 100.0 => 1,
            small if small >= 1.0 => 2,
            _ => 3,
        };
        let shown = format!("{number:.digits$}");
        let is_start = |cell: &String| cell == &shown || cell.strip_prefix(&shown).is_some_and(|rest| rest.starts_with(' '));
        assert!(self.cells.iter().any(is_start), "{shown} is in no cell; it is of {origin}");
    }
}
