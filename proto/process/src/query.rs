//! The query of a request target as pairs. Nothing is decoded.

/// Returns the parameters of a query with their values. One without `=` has an empty value.
pub fn parameters(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
    parameters.map(|parameter| parameter.split_once('=').unwrap_or((parameter, "")))
}

/// A parameter that occurs twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("parameter {0} occurs twice")]
pub struct RepeatedParameter(pub &'static str);

/// Sets the value of a parameter.
///
/// # Errors
/// [`RepeatedParameter`] if it has one.
pub fn set_once<T>(
    slot: &mut Option<T>,
    value: T,
    name: &'static str,
) -> Result<(), RepeatedParameter> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(RepeatedParameter(name)),
    }
}
