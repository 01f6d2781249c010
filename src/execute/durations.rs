//! Durations in messages.

use std::time::Duration;

/// A number of seconds, whatever was written into a manifest: a negative one is 0, and one that no duration holds is the
/// longest there is.
pub fn seconds_of(count: f64) -> String {
    seconds(Duration::try_from_secs_f64(count.max(0.0)).unwrap_or(Duration::MAX))
}

/// A duration in the unit that reads best: seconds, minutes or hours.
pub fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_seconds_can_be_told() {
        assert_eq!([seconds_of(1.5), seconds_of(-3.0), seconds_of(f64::NAN)], ["1.5 s", "0.0 s", "0.0 s"]);
        assert!(seconds_of(1e300).ends_with(" h") && seconds_of(f64::INFINITY).ends_with(" h"));
    }
}
