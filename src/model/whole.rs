//! A model's parameters where one rank has them all: a pass reads them where they are.

use super::exchange::{ParameterSource, Unit, UnitGradients, UnitTensors};
use super::parameters::{Gradients, Layout, Parameter};
use crate::device::Device;

/// Whole parameters, and room for their gradients where a pass has a backward.
pub struct Whole<'a, D: Device> {
    layout: &'a Layout,
    parameters: &'a [Parameter<D>],
    gradients: Option<&'a mut Gradients<D>>,
}

impl<'a, D: Device> Whole<'a, D> {
    pub(super) fn new(layout: &'a Layout, parameters: &'a [Parameter<D>], gradients: Option<&'a mut Gradients<D>>) -> Self {
        Whole { layout, parameters, gradients }
    }
}

fn tensors<'a, D: Device>(parameters: &'a [Parameter<D>], indices: &[usize]) -> UnitTensors<'a, D> {
    UnitTensors::new(indices.iter().map(|&index| (index, &parameters[index])).collect())
}

impl<D: Device> ParameterSource<D> for Whole<'_, D> {
    fn forward(&mut self, unit: Unit, _: Option<Unit>, compute: &mut dyn FnMut(&UnitTensors<'_, D>)) {
        compute(&tensors(self.parameters, &self.layout.unit(unit)));
    }

    fn backward(&mut self, unit: Unit, _: Option<Unit>, compute: &mut dyn FnMut(&UnitTensors<'_, D>, &mut UnitGradients<'_, D>)) {
        let Some(gradients) = &mut self.gradients else { unreachable!("a backward without room for gradients") };
        let indices = self.layout.unit(unit);
        let gradients = gradients.buffers.iter_mut().enumerate().filter(|(index, _)| indices.contains(index));
        compute(&tensors(self.parameters, &indices), &mut UnitGradients::new(gradients.collect()));
    }

    fn finish_backward(&mut self) {}
}
