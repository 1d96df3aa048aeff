//! Text forms of times and names in files and responses.

use std::time::{Duration, SystemTime};

/// Rounds a time down to whole seconds, as files and responses contain it.
pub fn whole_seconds(time: SystemTime) -> SystemTime {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs().min(RFC3339_LAST_SECOND))
}

/// Formats a time as RFC 3339 in UTC with whole seconds.
pub fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(whole_seconds(time)).to_string()
}

/// Serializes a [`SystemTime`] as RFC 3339 text, for `#[serde(with = ...)]`.
pub mod time_text {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::rfc3339(*time))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map_err(de::Error::custom)
    }
}

/// Serializes an optional [`SystemTime`] like [`time_text`].
pub mod time_text_option {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(
        time: &Option<SystemTime>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => serializer.serialize_some(&super::rfc3339(*time)),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<SystemTime>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| humantime::parse_rfc3339(&text).map_err(de::Error::custom))
            .transpose()
    }
}

/// Serializes a [`NodeName`](tunnel_proto::wire::name::NodeName) as text.
pub mod name_text {
    use serde::{Deserialize, Deserializer, Serializer, de};
    use tunnel_proto::wire::name::NodeName;

    pub fn serialize<S: Serializer>(name: &NodeName, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(name.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NodeName, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|error| de::Error::custom(format_args!("{text:?}: {error}")))
    }
}

/// 9999-12-31T23:59:59Z. RFC 3339 has no form for later years.
const RFC3339_LAST_SECOND: u64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_beyond_the_text_form_are_clamped() {
        let far = SystemTime::UNIX_EPOCH + Duration::from_secs(RFC3339_LAST_SECOND + 5);
        assert_eq!(rfc3339(far), "9999-12-31T23:59:59Z");
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)),
            "1970-01-01T00:00:00Z"
        );
    }
}
