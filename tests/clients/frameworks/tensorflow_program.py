"""TensorFlow: a gradient."""

import tensorflow as tf

with tf.device("/GPU:0"):
    x, w = tf.ones((4096, 1024)), tf.Variable(tf.ones((1024, 1024)))
    with tf.GradientTape() as tape:
        loss = tf.function(lambda: tf.reduce_sum(tf.tanh(x @ w)))()
    [gradient] = tape.gradient(loss, [w])
print(len(tf.config.list_physical_devices("GPU")), gradient.shape)
