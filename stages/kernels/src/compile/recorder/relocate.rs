//! Several recordings of the same candidate become one program whose addresses are relative.
//!
//! Each had everything at other addresses. Eight bytes that differ between them must be an address of the same place with
//! the same offset in each; everything else must be equal. So what comes out is right wherever the tensors lie, and what
//! computes with addresses, looks at the clock or throws dice is found out, for the price of three short runs.

use std::collections::HashMap;

use super::layout::Layout;
use super::machine_code::MachineCode;
use super::recording::{Noted, NotedLaunch};
use crate::program::{
    Address, Bytes, Kernel, KernelAttribute, Launch, LaunchAttribute, Place, Program, Relocation, Step,
};

/// How often `launch` is recorded.
pub const TIMES: usize = 3;

/// Why recordings are no program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// They differ in more than addresses.
    Differs,
    /// A fill or a copy leaves what it begins in; or names no place at all.
    Outside(&'static str),
    /// No honest recorder writes this.
    Odd,
}

/// One program of the recordings of a module.
pub fn unite(
    recordings: [&[Noted]; TIMES],
    layouts: &[Layout; TIMES],
    module: &MachineCode,
) -> Result<Program, Misfit> {
    let [first, others @ ..] = recordings;
    if others.iter().any(|other| other.len() != first.len()) {
        return Err(Misfit::Differs);
    }
    let mut united =
        United { layouts, module, program: Program::default(), kernels: HashMap::new(), set: HashMap::new() };
    for index in 0..first.len() {
        united.note(recordings.map(|recording| &recording[index]))?;
    }
    Ok(united.finish())
}

struct United<'a> {
    layouts: &'a [Layout; TIMES],
    module: &'a MachineCode,
    program: Program,
    /// The program's number of a kernel of the module.
    kernels: HashMap<usize, usize>,
    /// What was set for each kernel of the module, last.
    set: HashMap<usize, Vec<(KernelAttribute, i32)>>,
}

/// The same of all three, or they differ.
fn same<T: PartialEq>([first, second, third]: [T; TIMES]) -> Result<T, Misfit> {
    if first == second && first == third { Ok(first) } else { Err(Misfit::Differs) }
}

impl United<'_> {
    fn note(&mut self, notes: [&Noted; TIMES]) -> Result<(), Misfit> {
        let step = match notes {
            [Noted::Launch(a), Noted::Launch(b), Noted::Launch(c)] => Step::Launch(self.launch([a, b, c])?),
            [
                Noted::Fill { to: a, pitch, value, width, height },
                Noted::Fill { to: b, pitch: p2, value: v2, width: w2, height: h2 },
                Noted::Fill { to: c, pitch: p3, value: v3, width: w3, height: h3 },
            ] => {
                same([(pitch, value, width, height), (p2, v2, w2, h2), (p3, v3, w3, h3)])?;
                let (pitch, value, width, height) = (*pitch, *value, *width, *height);
                Step::Fill {
                    to: self.inside([*a, *b, *c], [pitch, width, height], "a fill")?,
                    pitch,
                    value,
                    width,
                    height,
                }
            }
            [
                Noted::Copy { to: a, to_pitch, from: x, from_pitch, width, height },
                Noted::Copy { to: b, to_pitch: t2, from: y, from_pitch: f2, width: w2, height: h2 },
                Noted::Copy { to: c, to_pitch: t3, from: z, from_pitch: f3, width: w3, height: h3 },
            ] => {
                same([(to_pitch, from_pitch, width, height), (t2, f2, w2, h2), (t3, f3, w3, h3)])?;
                let (to_pitch, from_pitch, width, height) = (*to_pitch, *from_pitch, *width, *height);
                let to = self.inside([*a, *b, *c], [to_pitch, width, height], "a copy")?;
                let from = self.inside([*x, *y, *z], [from_pitch, width, height], "a copy")?;
                Step::Copy { to, to_pitch, from, from_pitch, width, height }
            }
            [
                Noted::Write { to: a, pitch, width, bytes: x },
                Noted::Write { to: b, pitch: p2, width: w2, bytes: y },
                Noted::Write { to: c, pitch: p3, width: w3, bytes: z },
            ] => {
                same([(pitch, width), (p2, w2), (p3, w3)])?;
                let (pitch, width, height) = (*pitch, *width, x.len() as u64 / (*width).max(1));
                let to = self.inside([*a, *b, *c], [pitch, width, height], "a copy")?;
                Step::Write { to, pitch, width, bytes: self.bytes([x, y, z])? }
            }
            [Noted::Attribute { kernel, attribute, value }, ..] => {
                same(notes)?;
                let set = self.set.entry(*kernel).or_default();
                set.retain(|(known, _)| known != attribute);
                set.push((*attribute, *value));
                return Ok(());
            }
            _ => return Err(Misfit::Differs),
        };
        self.program.steps.push(step);
        Ok(())
    }

    fn launch(&mut self, launches: [&NotedLaunch; TIMES]) -> Result<Launch, Misfit> {
        let asked = |launch: &NotedLaunch| {
            (launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.attributes.clone())
        };
        let (kernel, grid, block, shared_bytes, attributes) = same(launches.map(asked))?;
        // What begins before the work before it has ended would begin before the clock.
        let is_first = !self.program.steps.iter().any(|step| matches!(step, Step::Launch(_)));
        let attributes = attributes.into_iter().filter_map(|attribute| match attribute {
            [2, 0, ..] | [6, 0, ..] => None,
            [2, ..] => Some(Ok(LaunchAttribute::Cooperative)),
            [4, x, y, z] => Some(Ok(LaunchAttribute::Cluster([x, y, z]))),
            [5, policy, ..] => Some(Ok(LaunchAttribute::ClusterScheduling(policy))),
            [6, ..] => (!is_first).then_some(Ok(LaunchAttribute::ProgrammaticSerialization)),
            [14, percent, ..] => Some(Ok(LaunchAttribute::Carveout(percent))),
            _ => Some(Err(Misfit::Odd)),
        });
        let attributes = attributes.collect::<Result<_, _>>()?;
        let parameters = self.bytes(launches.map(|launch| launch.parameters.as_slice()))?;
        Ok(Launch { kernel: self.kernel(kernel), grid, block, shared_bytes, attributes, parameters })
    }

    fn kernel(&mut self, of_module: usize) -> usize {
        let kernels = &mut self.program.kernels;
        let facts = &self.module.kernels[of_module];
        *self.kernels.entry(of_module).or_insert_with(|| {
            let (symbol, parameters) = (facts.symbol.clone(), facts.parameters.clone());
            kernels.push(Kernel { symbol, attributes: Vec::new(), parameters });
            kernels.len() - 1
        })
    }

    /// Where three addresses lie.
    fn place(&self, addresses: [u64; TIMES]) -> Option<Address> {
        let [first, second, third] = self.layouts;
        let address = first.place_of(addresses[0])?;
        let others = [second.place_of(addresses[1])?, third.place_of(addresses[2])?];
        others.iter().all(|other| *other == address).then_some(address)
    }

    /// Where rows lie that must not leave what they begin in.
    fn inside(
        &self,
        addresses: [u64; TIMES],
        [pitch, width, height]: [u64; 3],
        what: &'static str,
    ) -> Result<Address, Misfit> {
        let outside = Misfit::Outside(what);
        let Some(address) = self.place(addresses) else {
            let all = self.layouts.iter().zip(addresses).all(|(layout, address)| layout.place_of(address).is_some());
            return Err(if all { Misfit::Differs } else { outside });
        };
        let end = || {
            let rows = height.checked_sub(1)?.checked_mul(pitch)?.checked_add(width)?;
            u64::try_from(address.offset).ok()?.checked_add(rows)
        };
        let size = self.layouts[0].size(address.of);
        // The driver has less room for a pitch.
        let is_row = height == 1 || (pitch >= width && pitch <= i32::MAX as u64);
        match end() {
            Some(end) if end <= size && width > 0 && is_row => Ok(address),
            _ => Err(outside),
        }
    }

    fn bytes(&self, copies: [&[u8]; TIMES]) -> Result<Bytes, Misfit> {
        let length = same(copies.map(<[u8]>::len))?;
        let [first, second, third] = copies;
        let mut data = first.to_vec();
        let mut addresses = Vec::new();
        // Everything before is explained.
        let mut known = 0;
        while let Some(differs) = (known..length).find(|at| first[*at] != second[*at] || first[*at] != third[*at]) {
            let word =
                |bytes: &[u8], at: usize| bytes.get(at..at + 8)?.first_chunk().map(|word| u64::from_le_bytes(*word));
            let found = (differs.saturating_sub(7).max(known)..=differs).find_map(|at| {
                let words = [word(first, at)?, word(second, at)?, word(third, at)?];
                Some((at, self.place(words)?))
            });
            let (at, address) = found.ok_or(Misfit::Differs)?;
            data[at..at + 8].fill(0);
            addresses.push(Relocation { at: u32::try_from(at).map_err(|_| Misfit::Odd)?, address });
            known = at + 8;
        }
        Ok(Bytes { data, addresses })
    }

    /// Only what is used is kept.
    fn finish(mut self) -> Program {
        for (of_module, index) in &self.kernels {
            self.program.kernels[*index].attributes = self.set.remove(of_module).unwrap_or_default();
        }
        let mut used: HashMap<usize, usize> = HashMap::new();
        let Program { variables, steps, .. } = &mut self.program;
        let mut rename = |address: &mut Address| {
            if let Place::Variable(of_module) = &mut address.of {
                *of_module = *used.entry(*of_module).or_insert_with(|| {
                    variables.push(self.module.variables[*of_module].0.clone());
                    variables.len() - 1
                });
            }
        };
        for step in steps {
            match step {
                Step::Launch(launch) => launch.parameters.addresses.iter_mut().for_each(|one| rename(&mut one.address)),
                Step::Fill { to, .. } => rename(to),
                Step::Copy { to, from, .. } => {
                    rename(to);
                    rename(from);
                }
                Step::Write { to, bytes, .. } => {
                    rename(to);
                    bytes.addresses.iter_mut().for_each(|one| rename(&mut one.address));
                }
            }
        }
        self.program
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Order;
    use super::super::recording::tests::module;
    use super::*;
    use crate::random::Choices;

    const SIZES: [u64; 3] = [4000, 4000, 256];

    fn layouts() -> [Layout; TIMES] {
        [(Order::Forwards, 1), (Order::Backwards, 2), (Order::Shuffled, 3)]
            .map(|(order, seed)| Layout::draw(&SIZES, &module(), order, &mut Choices(seed)).unwrap())
    }

    /// Where something lies in a layout: told by the layout's own text.
    fn start(layout: &Layout, argument: usize) -> u64 {
        layout.told(&module()).lines().nth(2 + argument).unwrap().parse().unwrap()
    }

    fn variable(layout: &Layout) -> u64 {
        let told = layout.told(&module());
        let line = told.lines().find(|line| line.starts_with("table ")).unwrap();
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn united(note: impl Fn(&Layout, usize) -> Vec<Noted>) -> Result<Program, Misfit> {
        let layouts = layouts();
        let notes: Vec<Vec<Noted>> = layouts.iter().enumerate().map(|(run, layout)| note(layout, run)).collect();
        unite([&notes[0], &notes[1], &notes[2]], &layouts, &module())
    }

    fn launch(parameters: Vec<u8>) -> Noted {
        let (grid, block) = ([1; 3], [32, 1, 1]);
        Noted::Launch(NotedLaunch { kernel: 0, grid, block, shared_bytes: 0, attributes: Vec::new(), parameters })
    }

    fn parameters_of(program: &Program) -> &Bytes {
        program.launches().next().map(|(_, launch)| &launch.parameters).unwrap()
    }

    #[test]
    fn addresses_are_found_at_any_byte() {
        for before in 0..12 {
            let program = united(|layout, _| {
                let pointers = [start(layout, 0), start(layout, 1) + 4000, start(layout, 0) - 12, variable(layout) + 4];
                let bytes: Vec<u8> = pointers.iter().flat_map(|pointer| pointer.to_le_bytes()).collect();
                vec![launch([vec![7; before], bytes, vec![9; 3]].concat())]
            });
            let program = program.unwrap();
            let bytes = parameters_of(&program);
            let found: Vec<_> =
                bytes.addresses.iter().map(|one| (one.at, one.address.of, one.address.offset)).collect();
            let at = |index: usize| u32::try_from(before + 8 * index).unwrap();
            let expected = [
                (at(0), Place::Argument(0), 0),
                (at(1), Place::Argument(1), 4000),
                (at(2), Place::Argument(0), -12),
                (at(3), Place::Variable(0), 4),
            ];
            assert_eq!(found, expected);
            assert_eq!(program.variables, ["table"]);
            assert!(bytes.data[..before].iter().all(|byte| *byte == 7) && bytes.data.ends_with(&[0, 9, 9, 9]));
        }
    }

    proptest::proptest! {
        /// What a program makes of a layout is what was noted with it, whatever lies around the addresses.
        #[test]
        fn a_program_gives_back_what_was_noted(
            pieces in proptest::collection::vec((proptest::collection::vec(proptest::num::u8::ANY, 0..10), 0..3_usize, 0..256_u64), 0..6),
        ) {
            let bytes_in = |layout: &Layout| -> Vec<u8> {
                pieces.iter().flat_map(|(before, argument, offset)| {
                    [before.clone(), (start(layout, *argument) + offset).to_le_bytes().to_vec()].concat()
                }).collect()
            };
            let program = united(|layout, _| vec![launch(bytes_in(layout))]).unwrap();
            let fresh = Layout::draw(&SIZES, &module(), Order::Shuffled, &mut Choices(99)).unwrap();
            let resolved = parameters_of(&program).resolved(|address| match address.of {
                Place::Argument(index) => start(&fresh, index).checked_add_signed(address.offset).unwrap(),
                Place::Variable(_) => 0,
            });
            proptest::prop_assert_eq!(resolved, bytes_in(&fresh));
        }
    }

    #[test]
    fn what_is_computed_from_addresses_is_found_out() {
        let pointer = |value: u64| vec![launch(value.to_le_bytes().to_vec())];
        let (x, y) = (|layout: &Layout| start(layout, 0), |layout: &Layout| start(layout, 1));
        assert_eq!(united(|layout, _| pointer(x(layout).wrapping_sub(y(layout)))), Err(Misfit::Differs));
        assert_eq!(united(|layout, _| pointer(x(layout) >> 4)), Err(Misfit::Differs));
        assert_eq!(united(|layout, _| pointer(x(layout) & 0xffff_ffff)), Err(Misfit::Differs));
        assert_eq!(united(|layout, run| pointer(if run == 1 { x(layout) } else { y(layout) })), Err(Misfit::Differs));
        assert_eq!(united(|layout, run| pointer(x(layout) + run as u64)), Err(Misfit::Differs));
        assert_eq!(united(|_, run| pointer(run as u64)), Err(Misfit::Differs));
        assert_eq!(united(|layout, run| if run == 2 { vec![] } else { pointer(x(layout)) }), Err(Misfit::Differs));
        assert!(united(|_, _| pointer(12)).is_ok());
    }

    #[test]
    fn fills_and_copies_stay_in_what_they_begin_in() {
        let fill = |offset: i64, pitch: u64, width: u64, height: u64| {
            united(|layout, _| {
                let to = start(layout, 0).checked_add_signed(offset).unwrap();
                vec![Noted::Fill { to, pitch, value: 0, width, height }]
            })
        };
        for (offset, pitch, width, height) in [(0, 4000, 4000, 1), (3999, 1, 1, 1), (0, 400, 400, 10), (16, 0, 8, 1)] {
            assert!(fill(offset, pitch, width, height).is_ok(), "{offset} {pitch} {width} {height}");
        }
        for (offset, pitch, width, height) in [
            (-1, 8, 8, 1),
            (4000, 1, 1, 1),
            (0, 4001, 4001, 1),
            (0, 400, 400, 11),
            (0, u64::MAX, 8, 3),
            (0, 4, 8, 2),
            (0, 8, 0, 1),
            (0, 8, 8, 0),
            (8, 8, u64::MAX, 1),
        ] {
            assert_eq!(fill(offset, pitch, width, height), Err(Misfit::Outside("a fill")));
        }
        let nowhere = united(|_, _| vec![Noted::Fill { to: 64, pitch: 1, value: 0, width: 1, height: 1 }]);
        assert_eq!(nowhere, Err(Misfit::Outside("a fill")));
        let copy = |from: usize, length: u64| {
            united(|layout, _| {
                let (to, from) = (start(layout, 0), start(layout, from));
                vec![Noted::Copy { to, to_pitch: length, from, from_pitch: length, width: length, height: 1 }]
            })
        };
        assert!(copy(2, 256).is_ok());
        assert_eq!(copy(2, 257), Err(Misfit::Outside("a copy")));
    }

    #[test]
    fn the_first_launch_waits_for_all_before_it() {
        let program = united(|_, _| {
            let one = |attributes: Vec<[u32; 4]>| match launch(Vec::new()) {
                Noted::Launch(launch) => Noted::Launch(NotedLaunch { attributes, ..launch }),
                other => other,
            };
            vec![one(vec![[6, 1, 0, 0], [4, 2, 1, 1]]), one(vec![[6, 1, 0, 0], [2, 0, 0, 0]])]
        });
        let program = program.unwrap();
        let attributes: Vec<_> = program.launches().map(|(_, launch)| launch.attributes.clone()).collect();
        let expected = [vec![LaunchAttribute::Cluster([2, 1, 1])], vec![LaunchAttribute::ProgrammaticSerialization]];
        assert_eq!(attributes, expected);
    }

    #[test]
    fn what_is_set_last_holds() {
        let program = united(|_, _| {
            let set = |value| Noted::Attribute { kernel: 0, attribute: KernelAttribute::Carveout, value };
            vec![set(10), set(50), launch(Vec::new())]
        });
        assert_eq!(program.unwrap().kernels[0].attributes, [(KernelAttribute::Carveout, 50)]);
    }
}
