// AdamW (Loshchilov and Hutter 2019) in PyTorch's form, and the rounded copy that products read.
//
//   g = scale * gradient;  first = beta1 first + (1 - beta1) g;  second = beta2 second + (1 - beta2) g^2
//   weight = weight (1 - rate decay) - rate / correction1 * first / (sqrt(second) / sqrt(correction2) + epsilon)
//
// Floor: 30 bytes per element (gradient, weight, first and second read, the last three and the bf16 copy written), 28 without the copy.
// Operations stand in the order of src/device/cpu/optimizer.rs.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;

namespace {

// What is the same for every element.
struct Step {
    float beta1, beta2, rest1, rest2; // rest = 1 - beta
    float step_size, keep, inverse_root_correction, epsilon, gradient_scale;

    DEVICE explicit Step(const AdamW& arguments) {
        beta1 = arguments.beta1;
        beta2 = arguments.beta2;
        rest1 = 1.0f - beta1;
        rest2 = 1.0f - beta2;
        step_size = arguments.learning_rate / arguments.correction1;
        keep = 1.0f - arguments.learning_rate * arguments.weight_decay;
        inverse_root_correction = 1.0f / square_root(arguments.correction2);
        epsilon = arguments.epsilon;
        gradient_scale = arguments.gradient_scale;
    }
    DEVICE void apply(float& weight, float gradient, float& first, float& second) const {
        gradient *= gradient_scale;
        first = multiply_add(beta1, first, rest1 * gradient);
        second = multiply_add(beta2, second, rest2 * gradient * gradient);
        const float denominator = multiply_add(square_root(second), inverse_root_correction, epsilon);
        weight = weight * keep - step_size * first / denominator;
    }
};

} // namespace

KERNEL(adamw, THREADS, AdamW, NoShared) {
    const Step step(arguments);
    const int64_t quads = arguments.length / 4;
    for (int64_t i = grid_thread(); i < quads; i += grid_threads()) {
        const int64_t place = 4 * i;
        float weight[4], gradient[4], first[4], second[4];
        load_floats(arguments.gradient + place, gradient);
        load_floats(arguments.weights + place, weight);
        load_floats(arguments.first + place, first);
        load_floats(arguments.second + place, second);
#pragma unroll
        for (int k = 0; k < 4; ++k) step.apply(weight[k], gradient[k], first[k], second[k]);
        store_floats(arguments.weights + place, weight);
        store_floats(arguments.first + place, first);
        store_floats(arguments.second + place, second);
        if (arguments.rounded != nullptr)
            store8(arguments.rounded + place, Vector8{{pack(weight[0], weight[1]), pack(weight[2], weight[3])}});
    }
    const int64_t tail = 4 * quads + grid_thread(); // up to three elements
    if (tail < arguments.length) {
        float weight = arguments.weights[tail], first = arguments.first[tail], second = arguments.second[tail];
        step.apply(weight, arguments.gradient[tail], first, second);
        arguments.weights[tail] = weight;
        arguments.first[tail] = first;
        arguments.second[tail] = second;
        if (arguments.rounded != nullptr) arguments.rounded[tail] = to_bf16(weight);
    }
}
