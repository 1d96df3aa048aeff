//! A JSON document with a long list, which is written while it is read.

use std::io::{self, Write};

use serde::Serialize;
use tunnel_process::schema::SCHEMA_VERSION;

/// Writes `{"schemaVersion": 1, NAME: [...]}`, indented as other documents, entry by entry.
#[derive(Debug)]
pub(super) struct JsonList {
    name: &'static str,
    is_begun: bool,
    has_entry: bool,
}

impl JsonList {
    /// Creates a document whose list is the field `name`.
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            is_begun: false,
            has_entry: false,
        }
    }

    /// Writes one entry of the list.
    pub(super) fn entry(&mut self, out: &mut impl Write, entry: &impl Serialize) -> io::Result<()> {
        self.begin(out)?;
        let separator = if self.has_entry { "," } else { "" };
        self.has_entry = true;
        write!(out, "{separator}\n    {}", indented(entry, "    ")?)
    }

    /// Writes the end of the document, with another field behind the list if there is one.
    pub(super) fn finish(
        mut self,
        out: &mut impl Write,
        field: Option<(&'static str, &impl Serialize)>,
    ) -> io::Result<()> {
        self.begin(out)?;
        out.write_all(if self.has_entry { b"\n  ]" } else { b"]" })?;
        if let Some((name, value)) = field {
            write!(out, ",\n  \"{name}\": {}", indented(value, "  ")?)?;
        }
        out.write_all(b"\n}\n")?;
        out.flush()
    }

    fn begin(&mut self, out: &mut impl Write) -> io::Result<()> {
        if std::mem::replace(&mut self.is_begun, true) {
            return Ok(());
        }
        let name = self.name;
        write!(
            out,
            "{{\n  \"schemaVersion\": {SCHEMA_VERSION},\n  \"{name}\": ["
        )
    }
}

/// Returns a value as JSON whose lines after the first begin with `margin`.
fn indented(value: &impl Serialize, margin: &str) -> io::Result<String> {
    // A line break in a string is escaped, so each one in the text is between values.
    let text = serde_json::to_string_pretty(value)?;
    Ok(text.replace('\n', &format!("\n{margin}")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn document_is_that_of_one_piece() {
        for count in 0..3 {
            let entry = |number| json!({"node": format!("n{number}\n"), "labels": {"a": [number]}});
            let entries: Vec<Value> = (0..count).map(entry).collect();
            let totals = json!({"nodes": count});
            for field in [None, Some(("totals", &totals))] {
                let (mut list, mut out) = (JsonList::new("nodes"), Vec::new());
                for entry in &entries {
                    list.entry(&mut out, entry).unwrap();
                }
                list.finish(&mut out, field).unwrap();
                let mut whole = json!({"schemaVersion": 1, "nodes": entries});
                if field.is_some() {
                    whole["totals"] = totals.clone();
                }
                let written = String::from_utf8(out).unwrap();
                assert_eq!(serde_json::from_str::<Value>(&written).unwrap(), whole);
                let lines = |text: &str| text.lines().map(str::len).sum::<usize>();
                let pretty = serde_json::to_string_pretty(&whole).unwrap();
                assert_eq!(lines(&written), lines(&pretty), "{written}");
            }
        }
    }
}
